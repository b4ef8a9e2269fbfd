"""One file for each kind of work that the benchmark measures."""
