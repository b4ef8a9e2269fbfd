"""Observe, decide, scale, record: how many replicas a pool has, and why."""
