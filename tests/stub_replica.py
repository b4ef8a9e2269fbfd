"""A replica for tests of the autoscaler: a process that holds a lease, honours SIGTERM and serves nothing.

``python -m tests.stub_replica PORT READY_AFTER DRAIN HOW --pool P --id I --config C [--lifeline-fd N]``: with PORT 0
there is no lease; HOW is ``works`` or ``fails`` (it says why and exits with status 3).
Exit status: 0 drained, 9 forced.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from stores.membership import ReplicaDirectory
from stores.settings import StoreSettings
from stores.store import Store
from wire.errors import TidegateError
from wire.membership import ReplicaLease, ReplicaState


async def main(port: int, ready_after: float, drain: float, options: dict[str, str]) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, lambda: os._exit(9) if stop.is_set() else stop.set())
    if "--lifeline-fd" in options:
        loop.add_reader(int(options["--lifeline-fd"]), stop.set)
    print("up", flush=True)
    store = Store.connect(StoreSettings(embedded_port=port or 1, timeout_seconds=1.0), client_name="stub")
    directory = ReplicaDirectory(store)
    lease = ReplicaLease(id=options["--id"], pool=options["--pool"], state=ReplicaState.STARTING)

    async def renew(state: ReplicaState) -> None:
        nonlocal lease
        if port:
            with suppress(TidegateError):
                if state is ReplicaState.READY and lease.ready_at is None:
                    lease = lease.model_copy(update={"ready_at": await store.now()})
                lease = lease.model_copy(update={"state": state})
                await directory.renew(lease, 2.0, announce=False)

    begun = loop.time()
    while not stop.is_set():
        await renew(ReplicaState.READY if loop.time() - begun >= ready_after else ReplicaState.STARTING)
        try:
            async with asyncio.timeout(0.2):
                await stop.wait()
        except TimeoutError:
            continue
    await renew(ReplicaState.DRAINING)
    await asyncio.sleep(drain)
    if port:
        with suppress(TidegateError):
            await directory.leave(lease.pool, lease.id)
    await store.close()
    return 0


if __name__ == "__main__":
    if sys.argv[4] == "fails":
        print("no such model: segmenter")
        sys.exit(3)
    rest = sys.argv[5:]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    sys.exit(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), given)))
