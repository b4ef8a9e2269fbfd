"""The autoscaler's loop: observe -> decide -> scale -> record, for every pool, on each tick and each poke."""

import asyncio
import logging
import signal
from collections.abc import Mapping
from contextlib import aclosing, suppress

from autoscaler.backends.base import ScalerBackend
from autoscaler.observe import Observer
from autoscaler.pool_scaler import PoolScaler
from autoscaler.settings import AutoscalerSettings
from stores.scaling import Activations, DecisionLog, Leadership
from stores.store import Store
from wire.errors import TidegateError
from wire.pools import PoolSettings
from wire.queues import QueueSettings

#: Pokes of a busy pool cause no more than one tick in this time. Unit: seconds.
_POKE_GAP_SECONDS = 0.1
#: While the store is away it is tried again this often, and complained of this rarely. Unit: seconds.
_AWAY_PAUSE_SECONDS = 1.0
_COMPLAIN_SECONDS = 30.0

_logger = logging.getLogger(__name__)


async def run_autoscaler(
    *,
    settings: AutoscalerSettings,
    pools: Mapping[str, PoolSettings],
    queues: Mapping[str, QueueSettings],
    store: Store,
    backend: ScalerBackend,
    token: str,
) -> int:
    """Scale ``pools`` until SIGTERM or SIGINT; the exit code.

    On the first signal the tick under way is finished, leadership is released, and the replicas go on: who ends the
    system drains them. A second signal ends at once. ``token`` names this process among autoscalers. The store may
    come and go: while it is away nothing is scaled.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    main = asyncio.current_task()
    assert main is not None

    def on_signal() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await Autoscaler(settings, pools, queues, store, backend, token).run(stop)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return 0


class Autoscaler:
    """Ticks every pool when it is due or poked, while this process leads."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        pools: Mapping[str, PoolSettings],
        queues: Mapping[str, QueueSettings],
        store: Store,
        backend: ScalerBackend,
        token: str,
    ) -> None:
        self._settings = settings
        self._leadership = Leadership(store, token)
        self._activations = Activations(store)
        observer, log = Observer(store, queues, backend), DecisionLog(store)
        # Three polls and some slack: then a missing decision means that nobody decides.
        keep_seconds = 3 * settings.poll_seconds + 5.0
        self._scalers = {
            name: PoolScaler(name, pool.scaling, store, observer, backend, log, self._activations, keep_seconds)
            for name, pool in pools.items()
        }
        self._leading = False
        self._lease_until = 0.0
        self._complained_at: float | None = None
        self._due = dict.fromkeys(pools, 0.0)
        self._poked: set[str] = set()
        self._wake = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Tick until ``stop`` is set, then release leadership."""
        listener = asyncio.create_task(self._listen())
        stopper = asyncio.create_task(self._wake_on(stop))
        try:
            while not stop.is_set():
                pause = await self._round(stop)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                if self._poked and not stop.is_set():
                    self._poked_are_due()
                self._wake.clear()
        finally:
            listener.cancel()
            stopper.cancel()
            await asyncio.gather(listener, stopper, return_exceptions=True)
            with suppress(TidegateError):
                await self._leadership.release()

    async def _round(self, stop: asyncio.Event) -> float:
        """Renew leadership and tick the pools that are due; seconds until the next round."""
        try:
            if not await self._lead():
                return self._settings.leader_lease_seconds / 3
            for name, scaler in self._scalers.items():
                if self._now() >= self._due[name] and not stop.is_set():
                    # A tick that outlived the lease could act beside a new leader.
                    self._due[name] = await self._tick(name, scaler)
        except TidegateError as error:
            self._complain(error)
            return _AWAY_PAUSE_SECONDS
        self._complained_at = None
        next_due = min(self._due.values(), default=self._now() + self._settings.poll_seconds)
        return max(0.0, min(next_due - self._now(), self._settings.leader_lease_seconds / 3))

    async def _tick(self, name: str, scaler: PoolScaler) -> float:
        """One tick; when the pool is due again, by the loop's clock.

        Raises:
            TidegateError: STORE_UNAVAILABLE.
        """
        begun = self._now()
        try:
            look_again_in = await scaler.tick(is_leader=self._is_lease_fresh)
        except TidegateError:
            raise
        except Exception:  # one pool's fault must not stop the others
            _logger.exception("the tick of pool %s failed", name)
            look_again_in = self._settings.poll_seconds
        return begun + max(_POKE_GAP_SECONDS, min(self._settings.poll_seconds, look_again_in))

    async def _lead(self) -> bool:
        asked_at = self._now()
        leading = await self._leadership.hold(self._settings.leader_lease_seconds)
        if leading and not self._leading:
            _logger.info("this autoscaler leads")
            for name, scaler in self._scalers.items():
                await scaler.resume()
                self._due[name] = 0.0
        elif self._leading and not leading:
            _logger.warning("another autoscaler leads now")
        self._leading = leading
        self._lease_until = asked_at + self._settings.leader_lease_seconds
        return leading

    def _is_lease_fresh(self) -> bool:
        return self._leading and self._now() < self._lease_until

    async def _listen(self) -> None:
        """Note the pools that are poked. A lost poke costs at most one poll: what it tells is in the store."""
        pokes = self._activations.pokes(at_least_every_seconds=self._settings.poll_seconds)
        async with aclosing(pokes) as pools:  # type: ignore[type-var]
            async for pool in pools:
                if pool in self._scalers:
                    self._poked.add(pool)
                    self._wake.set()

    def _poked_are_due(self) -> None:
        for pool in self._poked:
            ticked_at = self._scalers[pool].ticked_at
            self._due[pool] = min(self._due[pool], ticked_at + _POKE_GAP_SECONDS)
        self._poked.clear()

    async def _wake_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._wake.set()

    def _complain(self, error: TidegateError) -> None:
        now = self._now()
        if self._complained_at is None or now - self._complained_at >= _COMPLAIN_SECONDS:
            self._complained_at = now
            _logger.warning("nothing is scaled: %s", error.message)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
