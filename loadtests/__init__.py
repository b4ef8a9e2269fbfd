"""Load tests and side-by-side benchmarks of the running system."""
