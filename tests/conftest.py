"""Fixtures that tests of several rooms share."""

from tests.triton import echo_repository, vision_repository
from tests.valkey import store, valkey

__all__ = ["echo_repository", "store", "valkey", "vision_repository"]
