"""What one replica cannot answer for its pool: read from all replicas and merged, or done on all of them."""
