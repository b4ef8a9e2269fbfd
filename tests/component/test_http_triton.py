"""The HTTP door in front of a real Triton: every answer equals that of a direct call, byte for byte.

What may differ is in docs/protocol.md under "Differences from Triton".
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import uvloop

from replicas.addresses import AttachAddresses
from tests.differential import http_cases, http_infer_cases
from tests.differential.http_requests import Parts
from tests.doors import Answer, BrokenTransferError, Caller, running_door
from tests.triton import MIXED_MODELS
from wire.errors import ERROR_KIND_HEADER
from wire.membership import ReplicaLease, ReplicaState
from wire.pools import ModelSettings, PoolSettings

LOOP_FACTORY = uvloop.new_event_loop

#: Headers of an error that the gateway words itself, which may differ from those of Triton's same error.
OWN_HEADERS = frozenset(("content-type", "connection", "retry-after", ERROR_KIND_HEADER.lower()))

_RETRY_AFTER = re.compile(rb"Retry-After: \d+\r\n")

TABLES = {
    "endpoints": http_cases.ENDPOINTS,
    "server": http_cases.SERVER,
    "framings": http_cases.FRAMINGS,
    "compression": http_cases.COMPRESSION,
    "generate": http_cases.GENERATE,
    "sequences": http_cases.SEQUENCES,
    "types": http_infer_cases.TYPES,
    "requests": http_infer_cases.REQUESTS,
    "bodies": http_infer_cases.BODIES,
}


@dataclass
class Pair:
    direct: int
    routed: int

    async def say(self, parts: Parts) -> tuple[list[Answer], list[Answer]]:
        return await said(self.direct, parts), await said(self.routed, parts)


async def said(port: int, parts: Parts) -> list[Answer]:
    """The answers to ``parts`` on one connection."""
    answers = []
    async with await Caller.open(port) as caller, asyncio.timeout(10):
        for part in parts:
            caller.send(part)
            answers.append(await caller.answer(head_only=part.startswith(b"HEAD")))
    return answers


@pytest.fixture
async def pair(mixed_triton: AttachAddresses) -> AsyncIterator[Pair]:
    lease = ReplicaLease(
        id="r", pool="vision", state=ReplicaState.READY, http_address=mixed_triton.http, models=MIXED_MODELS
    )
    settings = PoolSettings(models=tuple(ModelSettings(name=name) for name in MIXED_MODELS))
    async with running_door(lease, pools={"vision": settings}) as door:
        yield Pair(int(mixed_triton.http.rpartition(":")[2]), door.port)
        await door.settled()


def headers_of(answer: Answer) -> list[tuple[str, str]]:
    return sorted((name.lower(), value) for name, value in answer.headers if name.lower() not in OWN_HEADERS)


def assert_same(direct: Answer, routed: Answer) -> None:
    if routed.header(ERROR_KIND_HEADER) is None:
        # A 503 of the replica's own is told to be worth another try.
        assert _RETRY_AFTER.sub(b"", routed.raw) == direct.raw if routed.status == 503 else routed.raw == direct.raw
    else:
        assert (routed.status, routed.body, headers_of(routed)) == (direct.status, direct.body, headers_of(direct))


@pytest.mark.parametrize("table", TABLES)
async def test_answers_equal_those_of_a_direct_call(pair: Pair, table: str) -> None:
    """A-001, A-002, A-009 to A-012, A-014 to A-019, A-029."""
    different = []
    for name, parts in TABLES[table].items():
        try:
            for direct, routed in zip(*await pair.say(parts), strict=True):
                assert_same(direct, routed)
        except (AssertionError, BrokenTransferError, OSError, TimeoutError) as error:
            different.append(f"{name}: {error!r}"[:2000])
    assert not different, f"{len(different)} of {len(TABLES[table])}:\n" + "\n".join(different)
