"""Fixtures that tests of several rooms share."""

import os

# Before gRPC is first imported: after a fork its threads would start again in the child, find their files closed and
# abort it before it becomes the program it is meant to be. Tests use gRPC and start programs in one process.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"

from hypothesis import settings

from tests.triton import echo_repository, mixed_triton, vision_repository
from tests.valkey import store, valkey

# The same examples every time, however slow the machine is. Looking for new ones: --hypothesis-profile=fuzz
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", deadline=None, max_examples=20_000)
settings.load_profile("repeatable")

__all__ = ["echo_repository", "mixed_triton", "store", "valkey", "vision_repository"]
