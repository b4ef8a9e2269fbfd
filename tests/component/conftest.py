"""A test module that sets LOOP_FACTORY runs on that event loop, e.g. on the one that is used in production."""

import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    chosen = getattr(getattr(item, "module", None), "LOOP_FACTORY", asyncio.new_event_loop)
    return {"loop": chosen}
