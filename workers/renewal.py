"""Keeps claims alive from a thread of its own, so that job code that holds the event loop does not lose its job."""

import asyncio
import threading
from collections.abc import Callable, Mapping

from stores.job_claims import Claim, JobClaims
from stores.store import Store
from wire.errors import TidegateError
from wire.queues import QueueSettings

#: Renewals per ``claim_seconds``: two may fail before the claim is stale.
_PER_CLAIM_TIME = 3
#: Gap between tries while the store is away. Seconds.
_AGAIN_SECONDS = 0.5


class ClaimRenewal:
    """Renews every held claim of ``queues`` in time. ``on_lost`` is called in the renewal thread for each claim that
    another worker holds by now."""

    def __init__(
        self, store: Store, consumer: str, queues: Mapping[str, QueueSettings], on_lost: Callable[[Claim], None]
    ) -> None:
        self._store = store
        self._consumer = consumer
        self._queues = queues
        self._on_lost = on_lost
        self._held: dict[tuple[str, str], Claim] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._renew_all()), name="renewal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Stop renewing; returns when the thread has ended and its connections are closed."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 5.0)

    def hold(self, claim: Claim) -> None:
        with self._lock:
            self._held[claim.queue, claim.id] = claim

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._held.pop((claim.queue, claim.id), None)

    async def _renew_all(self) -> None:
        store = self._store.another()
        claims = JobClaims(store, self._consumer)
        try:
            await asyncio.gather(*(self._keep(claims, name, queue) for name, queue in self._queues.items()))
        finally:
            await store.close()

    async def _keep(self, claims: JobClaims, queue: str, settings: QueueSettings) -> None:
        gap = settings.claim_seconds / _PER_CLAIM_TIME
        while await self._sleep(gap):
            with self._lock:
                held = [claim for claim in self._held.values() if claim.queue == queue]
            try:
                lost = await claims.renew(queue, held)
            except TidegateError:
                gap = _AGAIN_SECONDS  # the claim loop reports the outage
                continue
            gap = settings.claim_seconds / _PER_CLAIM_TIME
            for claim in held:
                if claim.id in lost:
                    self._on_lost(claim)

    async def _sleep(self, seconds: float) -> bool:
        """False when it is time to stop."""
        until = asyncio.get_running_loop().time() + seconds
        while not self._stop.is_set():
            left = until - asyncio.get_running_loop().time()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, 0.1))
        return False
