"""Triton backends of ours. Their code runs inside Triton's Python stub, never in a process of this package."""
