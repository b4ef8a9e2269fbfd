"""Shared state in the Redis protocol. The only room that imports ``redis``."""
