"""Queues as a worker sees them: claim jobs, keep the claims, end each with one outcome.

Claims live in the consumer group :data:`wire.jobs.GROUP` of each stream. The scripts (``*.lua``) hold what must be
one step; each opens with the map of its keys. Every method raises ``TidegateError(STORE_UNAVAILABLE)`` when the store
does not answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from stores.job_stream import load_script, submitted_at
from stores.store import Store
from wire.jobs import (
    GROUP,
    Outcome,
    OutcomeStatus,
    dead_letter_key,
    outcome_channel,
    outcome_key,
    stream_key,
)

#: Holder of claims that were handed back; no worker has this name.
_HANDED_BACK = "handed-back"
#: About so many dead letters are kept per queue.
_KEPT_DEAD_LETTERS = 10_000
#: A blocking read waits at most this share of the connection's time limit, so that a quiet queue is no timeout.
_WAIT_SHARE = 0.5
_FIRST_ID = "0-0"


@dataclass(frozen=True, slots=True)
class Claim:
    """One delivery of one job to one consumer."""

    queue: str
    id: str
    consumer: str
    deliveries: int
    """Number of this delivery, the first is 1. With the consumer it fences: a later delivery ends this claim."""
    waited_seconds: float
    """Store time from submission to this delivery."""
    fields: Mapping[bytes, bytes]


class JobClaims:
    """What one consumer does with the jobs of its queues. ``consumer`` must be unique to the process."""

    def __init__(self, store: Store, consumer: str) -> None:
        self._store = store
        self.consumer = consumer
        self._cursors: dict[str, str] = {}
        self._finish = load_script(store, "finish.lua")
        self._dead_letter = load_script(store, "dead_letter.lua")
        self._take_over = load_script(store, "take_over.lua")
        self._renew = load_script(store, "renew.lua")
        self._hand_back = load_script(store, "hand_back.lua")
        self._forget = load_script(store, "forget_consumers.lua")

    async def claim_new(self, queues: Sequence[str], *, count_each: int, wait_seconds: float) -> list[Claim]:
        """At most ``count_each`` undelivered jobs of each queue; waits for the first one if there is none.

        The wait is cut to half of the connection's time limit. Groups that do not exist (first use, a store that
        came back empty) are made, from the beginning of the stream.
        """
        wait = min(wait_seconds, self._store.timeout_seconds * _WAIT_SHARE)
        streams = {stream_key(self._store.prefix, queue): queue for queue in queues}
        with self._store.errors():
            try:
                reply = await self._store.redis.xreadgroup(
                    GROUP, self.consumer, dict.fromkeys(streams, ">"), count=count_each, block=max(1, int(wait * 1000))
                )
            except ResponseError as error:
                if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                await self._make_groups(streams)
                return []
        entries = _entries_by_stream(reply)
        if not entries:
            return []
        now = await self._store.now()
        return [
            self._claim(streams[stream], entry_id, 1, fields, now)
            for stream, delivered in entries
            for entry_id, fields in delivered
            if fields is not None
        ]

    async def take_over(
        self, queue: str, *, count: int, stale_seconds: float, keep_seconds: float
    ) -> tuple[list[Claim], list[str]]:
        """Claims that were not renewed for ``stale_seconds`` or handed back, and the ids of jobs found lost.

        Looks at a bounded part of the pending jobs and goes on from there the next time. A lost job (its entry was
        trimmed or deleted while pending) gets the outcome LOST, kept for ``keep_seconds``.
        """
        lost = Outcome(
            job_id="@",
            queue=queue,
            status=OutcomeStatus.LOST,
            error="the job was deleted from its queue before it was done",
            error_kind="lost",
        )
        store = self._store
        with store.errors():
            try:
                cursor, taken, lost_ids = await self._take_over(
                    keys=[stream_key(store.prefix, queue)],
                    args=[
                        GROUP,
                        self.consumer,
                        int(stale_seconds * 1000),
                        self._cursors.get(queue, _FIRST_ID),
                        count,
                        outcome_key(store.prefix, queue, ""),
                        int(keep_seconds * 1000),
                        outcome_channel(store.prefix, queue),
                        lost.model_dump_json(),
                    ],
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                return [], []
        self._cursors[queue] = bytes(cursor).decode()
        now = await store.now() if taken else 0.0
        claims = [
            self._claim(queue, entry_id, deliveries, dict(zip(fields[::2], fields[1::2], strict=True)), now)
            for entry_id, deliveries, fields in taken
        ]
        return claims, [bytes(job_id).decode() for job_id in lost_ids]

    async def renew(self, queue: str, claims: Sequence[Claim]) -> set[str]:
        """Keep these claims of ``queue``; the ids of those that somebody else holds by now."""
        if not claims:
            return set()
        words: list[str | int] = [word for claim in claims for word in (claim.id, claim.deliveries)]
        with self._store.errors():
            lost = await self._renew(keys=[stream_key(self._store.prefix, queue)], args=[GROUP, self.consumer, *words])
        return {bytes(job_id).decode() for job_id in lost}

    async def finish(self, claim: Claim, outcome: Outcome, keep_seconds: float) -> bool:
        """Write the outcome, end the claim, delete the job and announce it, in one step.

        False when the claim was lost: somebody else holds the job, or it has an outcome. Nothing is written then.
        """
        with self._store.errors():
            return bool(await self._finish(keys=self._keys(claim), args=self._ending(claim, outcome, keep_seconds)))

    async def dead_letter(self, claim: Claim, outcome: Outcome, reason: str, keep_seconds: float) -> bool:
        """Like ``finish`` with a failed outcome, and the job's fields are kept among the dead letters."""
        keys = [*self._keys(claim), dead_letter_key(self._store.prefix, claim.queue)]
        args = [*self._ending(claim, outcome, keep_seconds), reason, _KEPT_DEAD_LETTERS]
        with self._store.errors():
            return bool(await self._dead_letter(keys=keys, args=args))

    async def hand_back(self, claim: Claim) -> bool:
        """End the claim without an outcome: the next take-over gets it, and this delivery is not counted.

        False when the claim was lost already.
        """
        with self._store.errors():
            args: list[str | int] = [GROUP, claim.id, claim.consumer, claim.deliveries, _HANDED_BACK]
            return bool(await self._hand_back(keys=self._keys(claim)[:1], args=args))

    async def forget_consumers(self, queue: str, unseen_seconds: float) -> int:
        """Forget the names of workers that hold nothing and were not seen for ``unseen_seconds``; how many."""
        keys = [stream_key(self._store.prefix, queue)]
        with self._store.errors():
            return int(await self._forget(keys=keys, args=[GROUP, int(unseen_seconds * 1000)]))

    async def _make_groups(self, streams: Mapping[str, str]) -> None:
        for stream in streams:
            try:
                await self._store.redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def _claim(self, queue: str, entry_id: bytes, deliveries: int, fields: Mapping[bytes, bytes], now: float) -> Claim:
        job_id = entry_id.decode()
        waited = max(0.0, now - submitted_at(job_id))
        return Claim(queue, job_id, self.consumer, int(deliveries), waited, fields)

    def _keys(self, claim: Claim) -> list[str]:
        prefix = self._store.prefix
        return [stream_key(prefix, claim.queue), outcome_key(prefix, claim.queue, claim.id)]

    def _ending(self, claim: Claim, outcome: Outcome, keep_seconds: float) -> list[str | int]:
        return [
            GROUP,
            claim.id,
            claim.consumer,
            claim.deliveries,
            outcome.model_dump_json(),
            int(keep_seconds * 1000),
            outcome_channel(self._store.prefix, claim.queue),
        ]


def _entries_by_stream(reply: Any) -> list[tuple[str, list[tuple[bytes, dict[bytes, bytes] | None]]]]:
    """XREADGROUP's answer in either protocol: RESP2 lists pairs, RESP3 is a map of lists of lists."""
    if isinstance(reply, dict):
        pairs = [(name, [entry for part in parts for entry in part]) for name, parts in reply.items()]
    else:
        pairs = list(reply or [])
    return [(bytes(name).decode(), entries) for name, entries in pairs]
