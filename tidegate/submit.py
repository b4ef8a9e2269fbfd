"""``tidegate submit``: files in, outcomes out, and meanwhile what is being waited for."""

import asyncio
import json
import mimetypes
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stores.job_stream import JobStream
from stores.membership import ReplicaDirectory
from stores.scaling import DecisionLog
from stores.store import Store
from tidegate.annotate import annotated_png, shown_text
from tidegate.report import with_store
from tidegate.settings import Loaded
from wire.errors import TidegateError
from wire.jobs import Job, Outcome, OutcomeStatus
from wire.membership import ReplicaLease, ReplicaState
from wire.queues import QueueSettings

_LOOK_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Submitted:
    """One file and what became of it. ``outcome`` None: there was none in time."""

    path: Path
    name: str
    job_id: str
    outcome: Outcome | None
    waited_for: str = ""
    """Without an outcome: what was known of its pools at the end."""

    @property
    def succeeded(self) -> bool:
        return self.outcome is not None and self.outcome.status is OutcomeStatus.SUCCEEDED

    @property
    def reason(self) -> str:
        """Why it did not succeed."""
        if self.outcome is None:
            why = f" ({self.waited_for})" if self.waited_for else ""
            return f"no outcome in time{why}; the job may still be done later"
        return self.outcome.error or self.outcome.status.value

    @property
    def result(self) -> dict[str, Any]:
        return (self.outcome.result if self.outcome is not None else None) or {}


def submit_files(
    loaded: Loaded, queue: str, files: list[Path], out: Path, timeout_seconds: float, *, as_json: bool
) -> int:
    """0 when every job succeeded, 1 when one failed, 2 when nothing was submitted.

    Raises:
        TidegateError: STORE_UNAVAILABLE before anything was submitted.
    """
    settings = loaded.system.queues.get(queue)
    if settings is None:
        return _refuse([f"there is no queue {queue}; known: {', '.join(sorted(loaded.system.queues))}"])
    wrong = [words for path in files if (words := _unfit(path, settings)) is not None]
    if wrong:
        return _refuse(wrong)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _refuse([f"the folder for results {out} cannot be made: {error.strerror}"])
    with Progress() as progress:
        done = with_store(loaded, lambda store: run_jobs(store, queue, settings, files, timeout_seconds, progress.tell))
    try:
        written = [path for each in done for path in write_result(each, out)]
    except OSError as error:
        sys.stderr.write(f"results cannot be written to {out}: {error.strerror}\n")
        return 1
    if as_json:
        sys.stdout.write(json.dumps([_as_json(each) for each in done], indent=2, ensure_ascii=False) + "\n")
    else:
        _show(done, written)
    for each in done:
        if not each.succeeded:
            sys.stderr.write(f"{each.path}: {each.reason}\n")
    return 0 if all(each.succeeded for each in done) else 1


async def run_jobs(
    store: Store,
    queue: str,
    settings: QueueSettings,
    files: list[Path],
    timeout_seconds: float,
    tell: Callable[[str], None],
) -> list[Submitted]:
    """Submit one job a file and wait; ``tell`` hears what is being waited for."""
    stream = JobStream(store, queue)
    ids: list[str] = []
    for path in files:
        content_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        payload = await asyncio.to_thread(path.read_bytes)
        job = Job(queue, payload, path.name, content_type, timeout_ms=int(timeout_seconds * 1000))
        ids.append(await stream.submit(job))
    outcomes: dict[str, Outcome] = {}
    watch = PoolWatch(store, settings.pools)
    limit = time.monotonic() + timeout_seconds
    while (waiting := set(ids) - outcomes.keys()) and time.monotonic() < limit:
        tell(f"{len(outcomes)} of {len(ids)} done; {await watch.look()}")
        outcomes |= await stream.wait(waiting, min(_LOOK_SECONDS, max(0.01, limit - time.monotonic())))
    names, why = unique_names(files), await watch.last_known() if waiting else ""
    return [
        Submitted(path, name, job_id, outcomes.get(job_id), "" if job_id in outcomes else why)
        for path, name, job_id in zip(files, names, ids, strict=True)
    ]


class PoolWatch:
    """What the jobs of these pools wait for, and the last failure seen: the replica that told it is soon gone."""

    def __init__(self, store: Store, pools: tuple[str, ...]) -> None:
        self._replicas, self._decisions = ReplicaDirectory(store), DecisionLog(store)
        self._pools = pools
        self._failures: dict[str, str] = {}

    async def look(self) -> str:
        """What is waited for now, for people."""
        try:
            return "; ".join([self._noticed(pool, await self._replicas.list(pool)) for pool in self._pools])
        except TidegateError as error:
            return error.message

    async def last_known(self) -> str:
        """Why there was no outcome, as far as it is known: the failures seen, or what the autoscaler says."""
        told = await self.look()
        if self._failures:
            return "; ".join(f"pool {pool} has no replica: {why}" for pool, why in self._failures.items())
        with suppress(TidegateError):
            for pool in self._pools:
                decision = await self._decisions.latest(pool)
                told += f"; pool {pool}: {'nobody decides' if decision is None else decision.explanation}"
        return told

    def _noticed(self, pool: str, leases: list[ReplicaLease]) -> str:
        if any(lease.state is ReplicaState.READY for lease in leases):
            self._failures.pop(pool, None)
        for lease in leases:
            if lease.state is ReplicaState.FAILED and lease.reason:
                self._failures[pool] = lease.reason
        return describe_wait(pool, leases)


def describe_wait(pool: str, leases: list[ReplicaLease]) -> str:
    """What the jobs of a pool wait for, from its replicas."""
    ready = sum(lease.state is ReplicaState.READY for lease in leases)
    if ready:
        return f"pool {pool} works on {ready} replica{'s' if ready > 1 else ''}"
    coming = [lease for lease in leases if lease.state in (ReplicaState.STARTING, ReplicaState.WARMING)]
    if coming:
        first = coming[0]
        finished = "".join(f", {stage.name} took {stage.seconds:.1f} s" for stage in first.stages)
        return f"pool {pool} wakes up: {first.state.value}, waiting for {first.waiting_for or 'its process'}{finished}"
    failed = [lease.reason for lease in leases if lease.state is ReplicaState.FAILED and lease.reason]
    if failed:
        return f"pool {pool} has no replica: {failed[-1]}"
    return f"pool {pool} is at zero and asked to wake up"


def unique_names(files: list[Path]) -> list[str]:
    """A name for the results of each file: its stem, or as much more as tells it from the others."""
    stems = Counter(path.stem for path in files)
    names: list[str] = []
    for path in files:
        name = path.stem if stems[path.stem] == 1 else path.name
        number, candidate = 2, name
        while candidate in names:
            number, candidate = number + 1, f"{name}-{number}"
        names.append(candidate)
    return names


def write_result(submitted: Submitted, out: Path) -> list[Path]:
    """``<name>.json``, and ``<name>.annotated.png`` where the result has regions of a picture. Raises OSError."""
    written = [out / f"{submitted.name}.json"]
    written[0].write_text(json.dumps(_as_json(submitted), indent=2, ensure_ascii=False) + "\n")
    picture = annotated_png(submitted.path.read_bytes(), submitted.result) if submitted.succeeded else None
    if picture is not None:
        written.append(out / f"{submitted.name}.annotated.png")
        written[1].write_bytes(picture)
    return written


def _unfit(path: Path, settings: QueueSettings) -> str | None:
    """Why this file cannot be submitted."""
    try:
        if not path.is_file():
            return f"{path}: {'is not a file' if path.exists() else 'no such file'}"
        size = path.stat().st_size
        if not os.access(path, os.R_OK):
            return f"{path}: cannot be read"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if size == 0:
        return f"{path}: the file is empty"
    if size > settings.payload_limit_bytes:
        return (
            f"{path}: {size} bytes are more than the queue takes (payload_limit_bytes: {settings.payload_limit_bytes})"
        )
    return None


def _refuse(sentences: list[str]) -> int:
    sys.stderr.writelines(f"{sentence}\n" for sentence in sentences)
    return 2


def _as_json(submitted: Submitted) -> dict[str, Any]:
    outcome = submitted.outcome
    return {
        "file": str(submitted.path),
        "job_id": submitted.job_id,
        "outcome": None if outcome is None else outcome.model_dump(mode="json"),
    }


def _show(done: list[Submitted], written: list[Path]) -> None:
    table = Table("file", "outcome", "regions", "waited", "worked", "text")
    for each in done:
        regions = each.result.get("regions", [])
        text = " / ".join(filter(None, map(shown_text, regions)))
        table.add_row(
            escape(each.path.name),
            each.outcome.status.value if each.outcome is not None else "none in time",
            str(len(regions)),
            _seconds(each.outcome.waited_seconds if each.outcome is not None else None),
            _seconds(each.outcome.worked_seconds if each.outcome is not None else None),
            escape(text if len(text) <= 200 else text[:197] + "..."),
        )
    console = Console()
    console.print(table)
    console.print(f"written: {', '.join(map(str, written))}", markup=False, highlight=False)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} s"


class Progress:
    """What is being waited for, on stderr: one changing line on a terminal, a line a change elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("submitting")
        self._began = time.monotonic()
        self._last = ""

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def tell(self, words: str) -> None:
        elapsed = f"[{time.monotonic() - self._began:5.1f} s]"
        if self._console.is_terminal:
            self._status.update(escape(f"{elapsed} {words}"))
        elif words != self._last:
            sys.stderr.write(f"{elapsed} {words}\n")
        self._last = words
