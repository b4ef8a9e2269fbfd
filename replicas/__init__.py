"""One Triton replica from its own side: launch or attach, residency, lease, drain."""
