"""Watching a Triton that serves: a Python stub that died, a server that hangs. Triton itself tells neither.

A dead stub stays a zombie for as long as its model is loaded: Triton reaps the stubs that it ends itself, at once, and
no other. The model answers ``Stub process '...' is not healthy`` for ever then, and is still called ready.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LOOK_SECONDS = 1.0
#: A stub that Triton ends is a zombie for a moment too; only one that still is after this was not ended by it.
_LOOK_AGAIN_SECONDS = 0.3
_ANSWER_SECONDS = 1.0
#: A busy machine misses one or two; with the times above a server that hangs is known after five seconds.
_MISSED_LOOKS = 3
#: Longer than any pause of a healthy server (a core dump, a debugger, a machine out of breath).
HUNG_SECONDS = 30.0
#: How the kernel names a stub: the first 15 characters.
_STUB = "triton_python_b"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a replica has to leave without being asked."""

    reason: str
    can_drain: bool
    """Whether its Triton can still finish what is in flight; False when it is gone or hangs."""


class Watched(Protocol):
    """What is watched."""

    def dead_stubs(self) -> Collection[int]:
        """Process ids of Python stubs that are dead and not reaped."""

    async def live(self, limit_seconds: float) -> bool:
        """Whether it answers within this time, on a connection that is closed again."""


async def watch(server: Watched, tell: Callable[[str | None], None]) -> Fault:
    """Return when the replica must leave. ``tell`` gets a sentence when the server hangs, None when it answers again.

    A look costs a request and about a millisecond.
    """
    loop = asyncio.get_running_loop()
    missed, answered_at = 0, loop.time()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if suspects := set(server.dead_stubs()):
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            if dead := suspects & set(server.dead_stubs()):
                return Fault(_stub_died(len(dead)), can_drain=True)
        if await server.live(_ANSWER_SECONDS):
            if missed >= _MISSED_LOOKS:
                tell(None)
            missed, answered_at = 0, loop.time()
            continue
        missed += 1
        silent = loop.time() - answered_at
        if missed >= _MISSED_LOOKS and silent >= HUNG_SECONDS:
            return Fault(f"Triton hangs: it has not answered for {silent:.0f} s", can_drain=False)
        if missed == _MISSED_LOOKS:
            tell("Triton hangs: it does not answer")


def dead_stubs(server_pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Python stubs among the children of ``server_pid`` that ended and were not reaped."""
    dead = []
    for children in proc.glob(f"{server_pid}/task/*/children"):
        for pid in _words(children):
            # pid (name) state ...; the name is the kernel's, so it may hold anything in between.
            name, _, rest = " ".join(_words(proc / pid / "stat")).rpartition(")")
            if name.endswith(f"({_STUB}") and rest.split()[:1] == ["Z"]:
                dead.append(int(pid))
    return dead


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []  # a thread or a child that has just ended


def _stub_died(count: int) -> str:
    what = "a process of Triton's Python backend" if count == 1 else f"{count} processes of Triton's Python backend"
    return f"{what} died (killed, out of memory or crashed); Triton does not start it again"
