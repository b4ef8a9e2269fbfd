"""Runs one replica as a process of its own, from a JSON document on the command line; see ``tests.triton``."""

import asyncio
import json
import logging
import sys
import time
from pathlib import Path

BEGUN = time.monotonic()

from replicas import watch  # noqa: E402
from replicas.agent import AttachAddresses, run_replica  # noqa: E402
from wire.pools import PoolSettings  # noqa: E402


def main(given: dict) -> int:  # type: ignore[type-arg]
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s %(message)s")
    logging.getLogger(__name__).info("imports took %.2f s", time.monotonic() - BEGUN)

    watch.HUNG_SECONDS = given.get("hung_seconds", watch.HUNG_SECONDS)

    def connect():  # type: ignore[no-untyped-def]
        from stores.settings import StoreSettings
        from stores.store import Store

        return Store.connect(StoreSettings(url=given["store_url"], timeout_seconds=2.0), client_name="replica")

    return asyncio.run(
        run_replica(
            pool=given["pool"],
            settings=PoolSettings.model_validate(given["settings"]),
            repository=Path(given["repository"]),
            run_dir=Path(given["run_dir"]),
            store=connect,
            replica_id=given["replica_id"],
            attach=AttachAddresses(*given["attach"]) if given.get("attach") else None,
            lifeline_fd=given.get("lifeline_fd"),
        )
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
