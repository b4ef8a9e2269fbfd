"""Fixtures that tests of several rooms share."""

from tests.valkey import store, valkey

__all__ = ["store", "valkey"]
