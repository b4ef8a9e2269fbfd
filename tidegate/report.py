"""``tidegate status`` and ``tidegate why``: what the store knows, for people and programs; unknown stays unknown."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stores.installation import owner
from stores.scaling import KEPT_DECISIONS, DecisionLog
from stores.snapshot import PoolSnapshot, Snapshot, read_snapshot
from stores.store import Store
from tidegate.settings import Loaded
from tidegate.supervisor.processes import Process, children_of_all, memory_bytes, processes_of
from tidegate.supervisor.record import running_record
from wire.decisions import DecisionRecord
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease

T = TypeVar("T")

_UNKNOWN = "unknown"


def with_store(loaded: Loaded, work: Callable[[Store], Awaitable[T]]) -> T:
    """``work`` with a connection to the store.

    Raises:
        TidegateError: STORE_UNAVAILABLE; or it is the embedded store of another installation.
    """

    async def connected() -> T:
        store = Store.connect(loaded.system.store, client_name="tidegate-cli")
        try:
            await _refuse_foreign(loaded, store)
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(connected())


async def _refuse_foreign(loaded: Loaded, store: Store) -> None:
    if loaded.system.store.url is not None:
        return  # shared on purpose, under key prefixes
    runs_it = await owner(store)
    if runs_it not in (None, str(loaded.config_path)):
        raise TidegateError(
            ErrorKind.STORE_UNAVAILABLE,
            f"the system of {loaded.config_path} does not run: on its store's port "
            f"{loaded.system.store.embedded_port} answers the one of {runs_it}",
        )


def show_status(loaded: Loaded, *, as_json: bool) -> int:
    """Print the state of everything. 0 when it could be read."""
    snapshot = with_store(loaded, lambda store: read_snapshot(store, loaded.pools, loaded.system.queues))
    processes = _processes(loaded)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(snapshot, processes), indent=2) + "\n")
        return 0
    console = Console()
    for pool in snapshot.pools:
        _show_pool(console, pool)
    _show_queues(console, snapshot)
    _show_gateways(console, snapshot)
    _show_processes(console, processes)
    return 0


def show_why(loaded: Loaded, pool: str, last: int, *, every: bool, as_json: bool) -> int:
    """Print the decision that holds now and the ``last`` ones that changed the number, newest first.

    ``every`` shows those too that gave another reason for the same number. 2 for an unknown pool.
    """
    if pool not in loaded.pools:
        sys.stderr.write(f"there is no pool {pool}; known: {', '.join(sorted(loaded.pools))}\n")
        return 2

    async def read(store: Store) -> tuple[DecisionRecord | None, list[DecisionRecord]]:
        decisions = DecisionLog(store)
        history = await decisions.history(pool, last if every else KEPT_DECISIONS)
        changes = [record for record in history if every or record.target != record.previous_target]
        return await decisions.latest(pool), changes[:last]

    latest, history = with_store(loaded, read)
    if as_json:
        document = {
            "latest": None if latest is None else latest.model_dump(mode="json"),
            "history": [record.model_dump(mode="json") for record in history],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Console()
    console.print(f"now: {_decided(latest)}")
    table = Table("when", "replicas", "reason", "why")
    for record in history:
        change = f"{record.previous_target} → {record.target}"
        table.add_row(_clock(record.at), change, record.reason.value, escape(record.explanation))
    if history:
        console.print(table)
    else:
        console.print("no decision yet" if every else "the number has not changed yet; --all shows every decision")
    return 0


def _decided(record: DecisionRecord | None) -> str:
    if record is None:
        return f"{_UNKNOWN}: no autoscaler has looked at this pool lately"
    return f"{record.target} ({record.reason.value}): {escape(record.explanation)}"


def _show_pool(console: Console, pool: PoolSnapshot) -> None:
    decision, load = pool.decision, pool.load
    demand = None if decision is None else decision.demand
    states = ", ".join(f"{count} {state}" for state, count in pool.states.items()) or "none"
    console.print(
        f"[bold]pool {pool.name}[/]  target {_shown(pool.target)}  replicas {states}  demand {_shown(demand)}"
    )
    console.print(f"  last decision: {_decided(decision)}")
    if load is not None:
        held, flying = load.held_interactive + load.held_job, load.in_flight_interactive + load.in_flight_job
        console.print(f"  at the gateway: {held} held, {flying} in flight, {load.requests_total} requests so far")
    for lease in pool.replicas:
        console.print(f"  {_replica_line(lease)}")


def _replica_line(lease: ReplicaLease) -> str:
    where = f"http {lease.http_address or _UNKNOWN}  grpc {lease.grpc_address or _UNKNOWN}"
    stages = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in lease.stages)
    extras = [
        f"waiting for {lease.waiting_for}" if lease.waiting_for else "",
        lease.reason or "",
        f"({stages})" if stages else "",
    ]
    return escape(" ".join([f"{lease.id}  {lease.state.value}", where, *filter(None, extras)]))


def _show_queues(console: Console, snapshot: Snapshot) -> None:
    table = Table("queue", "lag", "pending", "oldest waiting", "oldest in work")
    for queue in snapshot.queues:
        waiting, working = queue.oldest_undelivered_seconds, queue.oldest_pending_seconds
        table.add_row(queue.queue, _shown(queue.lag), _shown(queue.pending), _seconds(waiting), _seconds(working))
    console.print(table)


def _show_gateways(console: Console, snapshot: Snapshot) -> None:
    for gateway in snapshot.gateways:
        state = "draining" if gateway.draining else "serving"
        console.print(f"gateway {gateway.instance}  {state}  http {gateway.http_address}  grpc {gateway.grpc_address}")
    if not snapshot.gateways:
        console.print(f"gateway: {_UNKNOWN} (no instance reports)")


def _show_processes(console: Console, processes: list[dict[str, Any]]) -> None:
    if not processes:
        return
    table = Table("process", "state", "pid", "memory", "restarts", "last end")
    for process in processes:
        memory = process["memory_bytes"]
        table.add_row(
            process["name"],
            process["state"],
            str(process["pid"] or "-"),
            _UNKNOWN if memory is None else f"{memory / 2**20:.0f} MiB",
            str(process["restarts"]),
            process["last_exit"] or "-",
        )
    console.print(table)
    console.print("memory: with everything below the process that has no row of its own, shared pages counted once")


def _processes(loaded: Loaded) -> list[dict[str, Any]]:
    """Processes of this host that a supervisor here runs: itself, its children, and the replicas.

    The memory of each is that of everything it started (a replica: agent, Triton and Triton's stubs; the gateway: Ray)
    without what has a row of its own.
    """
    record = running_record(loaded.state_dir)
    if record is None:
        return []
    supervisor = {
        "name": "supervisor",
        "pid": record["pid"],
        "state": record["phase"],
        "restarts": 0,
        "last_exit": None,
    }
    replicas = [process for process in processes_of(loaded.config_path) if process.is_replica]
    rows = [supervisor, *record["processes"], *map(_replica_row, replicas)]
    children, pids = children_of_all(), {row["pid"] for row in rows}
    return [row | {"memory_bytes": memory_bytes(row["pid"], children, pids) if row["pid"] else None} for row in rows]


def _replica_row(process: Process) -> dict[str, Any]:
    words = process.command
    name = words[words.index("--id") + 1] if "--id" in words[:-1] else "replica"
    return {"name": name, "pid": process.pid, "state": "running", "restarts": 0, "last_exit": None}


def _as_json(snapshot: Snapshot, processes: list[dict[str, Any]]) -> dict[str, Any]:
    document = snapshot.model_dump(mode="json")
    for pool, row in zip(snapshot.pools, document["pools"], strict=True):
        decision = pool.decision
        row |= {
            "target": pool.target,
            "states": pool.states,
            "demand": None if decision is None else decision.demand,
        }
    for queue, row in zip(snapshot.queues, document["queues"], strict=True):
        row["backlog"] = queue.backlog
    return document | {"processes": processes}


def _shown(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).astimezone().strftime("%H:%M:%S")
