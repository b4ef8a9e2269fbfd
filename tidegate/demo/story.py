"""The demo's story, step by step, and its summary."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stores.scaling import DecisionLog
from stores.store import Store
from tidegate.annotate import shown_text
from tidegate.demo.calls import Call, call_both
from tidegate.demo.observer import Observed, look_at_statistics, observing
from tidegate.demo.pages import differences, write_pages
from tidegate.demo.system import DemoError, prepare
from tidegate.launch import reachable
from tidegate.lifecycle import start_detached, stop
from tidegate.report import with_store
from tidegate.settings import Loaded
from tidegate.submit import Progress, Submitted, run_jobs, write_result
from tidegate.supervisor.processes import processes_of
from wire.decisions import DecisionRecord
from wire.membership import ReplicaLease

_POOL = "vision"
_QUEUE = "segcls"
_JOB_SECONDS = 300.0
_ZERO_SECONDS = 90.0


def run_demo(loaded: Loaded, out: Path) -> int:
    """0 when everything came out as it should, 1 with the reason on stderr."""
    out = out.resolve()
    console = Console()
    # Told to stop, it stops what it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        demo = prepare(loaded, out)
        samples = loaded.system.deployments_dir / _POOL / "samples"
        _headline(console, "Starting the system, the pool at zero")
        if start_detached(demo.config_path) != 0:
            return 1
        try:
            summary = with_store(demo, lambda store: _main_job(console, demo, store, out, samples))
        finally:
            _headline(console, "Stopping")
            stopped = stop(demo)
        if stopped != 0 or (left := processes_of(demo.config_path)):
            raise DemoError("processes were left behind" + "".join(f"; {process}" for process in left))
        summary["processes_left"] = 0
        (out / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    except DemoError as error:
        sys.stderr.write(f"the demo failed: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("the demo was stopped\n")
        return 1
    console.print(f"No process is left. Everything is in {out}", markup=False, highlight=False)
    return 0


async def _main_job(console: Console, demo: Loaded, store: Store, out: Path, samples: Path) -> dict[str, Any]:
    files, known = write_pages(out / "pages", samples)
    async with observing(store, _POOL) as observed:
        _headline(console, f"Queueing {len(files)} pages to {_QUEUE}; the pool has {observed.now} replicas")
        began = time.monotonic()
        with Progress() as progress:
            settings = demo.system.queues[_QUEUE]
            done = await run_jobs(store, _QUEUE, settings, files, _JOB_SECONDS, progress.tell)
        seconds = time.monotonic() - began
        for submitted in done:
            _show_page(console, submitted, write_result(submitted, out))
        wrong = [f"{one.path.name}: {one.reason}" for one in done if not one.succeeded]
        wrong += [words for one in done if one.path.name in known for words in differences(one, known[one.path.name])]
        if wrong:
            raise DemoError("; ".join(wrong))
        console.print(
            f"Every line of the {len(known)} drawn pages was read as it was drawn, upside-down ones included."
        )

        _headline(console, "Calling the gateway with the stock client")
        gateway, host = demo.system.gateway, reachable(demo.system.gateway.host)
        calls = await asyncio.to_thread(call_both, f"{host}:{gateway.http_port}", f"{host}:{gateway.grpc_port}")
        for call in calls:
            scores = ", ".join(f"{score:.3f}" for score in call.scores)
            console.print(
                f"  {call.protocol}: classifier answers [{scores}] in {call.milliseconds:.0f} ms", markup=False
            )
        await look_at_statistics(observed)

        await _until_zero(console, store, observed)
        history = await DecisionLog(store).history(_POOL, 20)
        return _summary(console, observed, calls, len(files), seconds, history)


async def _until_zero(console: Console, store: Store, observed: Observed) -> None:
    _headline(console, "Waiting for the pool to go back to zero")
    limit = time.monotonic() + _ZERO_SECONDS
    decisions = DecisionLog(store)
    with Progress() as progress:
        while observed.now > 0:
            if time.monotonic() > limit:
                raise DemoError(f"the pool is not at zero after {_ZERO_SECONDS:g} s")
            latest = await decisions.latest(_POOL)
            progress.tell(f"{observed.now} replica; {'no decision' if latest is None else latest.reason.value}")
            await asyncio.sleep(0.2)
    console.print("The pool is at zero.")


def _summary(
    console: Console,
    observed: Observed,
    calls: list[Call],
    pages: int,
    seconds: float,
    history: list[DecisionRecord],
) -> dict[str, Any]:
    always_on = time.monotonic() - observed.began
    models = observed.by_model()
    requests = sum(count for count, _ in models.values())
    batches = sum(count for _, count in models.values())
    if batches == 0:
        raise DemoError("no replica told its statistics")
    _headline(console, "Summary")
    for lease in observed.leases.values():
        console.print(f"  cold start of {lease.id}: {_cold_start(lease)}", markup=False)
    console.print(f"  {pages} pages from zero in {seconds:.1f} s, cold start included")
    saved = 1 - observed.replica_seconds / always_on
    at_zero = observed.zero_seconds / always_on
    console.print(
        f"  replica-seconds: {observed.replica_seconds:.0f} used in {always_on:.0f} s, {saved:.0%} less than one "
        f"that is always on; the pool was at zero {at_zero:.0%} of the time"
    )
    console.print("  (the demo is short and nearly all work; the saving grows with the time in which nobody asks)")
    table = Table("model", "requests", "batches", "mean batch")
    for model, (count, executed) in sorted(models.items()):
        table.add_row(model, str(count), str(executed), f"{count / executed:.2f}" if executed else "-")
    table.add_row("all", str(requests), str(batches), f"{requests / batches:.2f}")
    console.print(table)
    for record in reversed(history):
        if record.target == record.previous_target:
            continue
        change = f"{record.previous_target} → {record.target} ({record.reason.value})"
        console.print(f"  {change}: {record.explanation}", markup=False, highlight=False)
    return {
        "pages": pages,
        "seconds": seconds,
        "cold_starts": {lease.id: _stages(lease) for lease in observed.leases.values()},
        "replica_seconds": observed.replica_seconds,
        "always_on_seconds": always_on,
        "zero_seconds": observed.zero_seconds,
        "models": {model: {"requests": count, "batches": executed} for model, (count, executed) in models.items()},
        "mean_batch": requests / batches,
        "calls": [{"protocol": call.protocol, "milliseconds": call.milliseconds} for call in calls],
        "decisions": [record.model_dump(mode="json") for record in history],
    }


def _cold_start(lease: ReplicaLease) -> str:
    total = "unknown" if lease.ready_at is None else f"{lease.ready_at - lease.started_at:.1f} s"
    return (
        f"{total} ({', '.join(f'{stage.name} {stage.seconds:.1f} s' for stage in lease.stages)}; models load at once)"
    )


def _stages(lease: ReplicaLease) -> dict[str, Any]:
    return {
        "seconds": None if lease.ready_at is None else lease.ready_at - lease.started_at,
        "stages": {stage.name: stage.seconds for stage in lease.stages},
    }


def _show_page(console: Console, submitted: Submitted, written: Iterable[Path]) -> None:
    outcome = submitted.outcome
    times = (
        "unknown"
        if outcome is None
        else f"waited {outcome.waited_seconds or 0:.1f} s, worked {outcome.worked_seconds or 0:.1f} s"
    )
    console.print(f"[bold]{escape(submitted.path.name)}[/]  {times}  → {', '.join(path.name for path in written)}")
    if not submitted.succeeded:
        console.print(f"  failed: {submitted.reason}", markup=False)
    for number, region in enumerate(submitted.result.get("regions", []), start=1):
        turned = "upside down" if region.get("orientation") == 180 else "upright"
        console.print(f"  {number:>2}  {turned:<11}  {shown_text(region)}", markup=False, highlight=False)


def _headline(console: Console, words: str) -> None:
    console.print(f"\n[bold]{words}[/]")
