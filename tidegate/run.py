"""``tidegate run ROLE``: one process of the system in the foreground. The supervisor and the autoscaler start these.

Each role imports its own room and nothing of the others: what a replica imports is part of a caller's cold start.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.launch import gateway_url
from tidegate.logs import LEVELS, start_logging
from tidegate.settings import Loaded, load
from wire.settings import SettingsError

if TYPE_CHECKING:
    from stores.store import Store

ROLES = ("gateway", "autoscaler", "worker", "replica", "supervisor")


def main(argv: Sequence[str]) -> int:
    """The exit code of the role in ``argv``; 2 when the settings or the arguments are wrong."""
    arguments = _parser().parse_args(argv)
    name = arguments.name or arguments.id or arguments.role
    start_logging(name, arguments.log_level)
    try:
        loaded = load(arguments.config, must_exist=not arguments.no_config_file)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.role != "gateway":
        # The Redis client loads the whole OpenTelemetry SDK wherever that is installed (Ray brings it): a tenth of a
        # second of every cold start, and megabytes, for instruments that nobody reads here.
        sys.modules.setdefault("opentelemetry", None)  # type: ignore[arg-type]
    return _ROLES[arguments.role](loaded, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate run", description="Run one process of the system.")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--config", type=Path, help="tidegate.yaml (default: the one here, if there is one)")
    parser.add_argument("--no-config-file", action="store_true", help="--config is a place without a file: defaults")
    parser.add_argument("--name", help="name of this process in logs and in the store")
    level = os.environ.get("TIDEGATE_LOG_LEVEL", "info")
    parser.add_argument("--log-level", choices=LEVELS, default=level if level in LEVELS else "info")
    parser.add_argument("--lifeline-fd", type=int, help="read end of a pipe; its end of file means: leave")
    parser.add_argument("--ray-dir", type=Path, help="gateway: short folder for Ray's sockets and logs")
    parser.add_argument("--pool", help="replica: its pool")
    parser.add_argument("--id", help="replica: its id")
    parser.add_argument("--attach-http", metavar="HOST:PORT", help="replica: a Triton that runs already")
    parser.add_argument("--attach-grpc", metavar="HOST:PORT")
    parser.add_argument("--attach-metrics", metavar="HOST:PORT")
    parser.add_argument("--notify-fd", type=int, help="supervisor: where it tells its progress, JSON lines")
    return parser


def _gateway(loaded: Loaded, arguments: argparse.Namespace) -> int:
    from gateway.app import run_gateway
    from gateway.settings import InstanceSettings
    from tidegate.raydir import ray_directory

    def settings(loaded: Loaded) -> InstanceSettings:
        system = loaded.system
        return InstanceSettings(system.gateway, system.store, loaded.pools, tuple(system.queues))

    def reread() -> InstanceSettings:
        return settings(load(arguments.config, must_exist=not arguments.no_config_file))

    with ray_directory(arguments.ray_dir) as ray_dir:
        return run_gateway(settings(loaded), ray_dir, reread)


def _worker(loaded: Loaded, arguments: argparse.Namespace) -> int:
    from stores.store import Store
    from workers.worker import run_worker

    name = arguments.name or f"worker-{os.getpid()}"

    async def work() -> int:
        store = Store.connect(loaded.system.store, client_name=f"tidegate-{name}")
        try:
            return await run_worker(
                queues=loaded.system.queues,
                settings=loaded.system.workers,
                store=store,
                gateway_url=loaded.system.workers.gateway.url or gateway_url(loaded),
                name=name,
                deployments=loaded.system.deployments_dir,
            )
        finally:
            await store.close()

    return asyncio.run(work())


def _autoscaler(loaded: Loaded, arguments: argparse.Namespace) -> int:
    from tidegate.local_scaling import run_local_autoscaler

    return asyncio.run(run_local_autoscaler(loaded, lifeline_fd=arguments.lifeline_fd))


def _replica(loaded: Loaded, arguments: argparse.Namespace) -> int:
    from replicas.agent import AttachAddresses, run_replica

    pool, replica_id = arguments.pool, arguments.id
    if pool not in loaded.pools or not replica_id:
        sys.stderr.write(f"run replica needs --id and --pool, one of: {', '.join(sorted(loaded.pools))}\n")
        return 2
    attach = None
    if arguments.attach_http or arguments.attach_grpc:
        attach = AttachAddresses(arguments.attach_http, arguments.attach_grpc, arguments.attach_metrics)

    def connect() -> "Store":
        from stores.store import Store

        return Store.connect(loaded.system.store, client_name=f"tidegate-{replica_id}")

    return asyncio.run(
        run_replica(
            pool=pool,
            settings=loaded.pools[pool],
            repository=loaded.repository(pool),
            run_dir=loaded.run_dir,
            # Not connected here: the store's driver is imported while Triton comes up.
            store=connect,
            replica_id=replica_id,
            attach=attach,
            lifeline_fd=arguments.lifeline_fd,
        )
    )


def _supervisor(loaded: Loaded, arguments: argparse.Namespace) -> int:
    from tidegate.supervisor.up import run_supervisor

    return asyncio.run(run_supervisor(loaded, notify_fd=arguments.notify_fd, log_level=arguments.log_level))


_ROLES = {
    "gateway": _gateway,
    "autoscaler": _autoscaler,
    "worker": _worker,
    "replica": _replica,
    "supervisor": _supervisor,
}
