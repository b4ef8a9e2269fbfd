"""When a replica leaves: being asked to, and waiting until nothing is in flight on its Triton."""

import asyncio
import os
import signal
from collections.abc import Callable, Collection

from replicas import sockets

#: A look reads all of the kernel's table of connections, some 10 ms on a machine with much memory.
_LOOK_SECONDS = 0.1
#: Nobody may be seen on this many looks in a row: a caller that is just connecting is seen on the next.
_QUIET_LOOKS = 2
#: A replica whose supervisor is gone has nobody to route to it for long.
LIFELINE_DRAIN_SECONDS = 5.0


class StopRequests:
    """Requests to this process to leave: SIGTERM, SIGINT, or the end of the lifeline. The second signal forces."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self.reason = ""
        self.drain_limit_seconds: float | None = None
        """A shorter limit than the configured one; None where that one holds."""

    def listen(self, lifeline_fd: int | None) -> None:
        """Take over the signals and watch the lifeline: a pipe on which nothing ever comes but its end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number.name)
        if lifeline_fd is not None:
            os.set_inheritable(lifeline_fd, False)  # noqa: FBT003 - takes no keyword
            loop.add_reader(lifeline_fd, self._lifeline_ended, lifeline_fd)

    def ask(self, reason: str) -> None:
        """Ask to leave; the first reason stays."""
        if not self.asked.is_set():
            self.reason = reason
            self.asked.set()

    def _signalled(self, name: str) -> None:
        if self.asked.is_set():
            self.forced.set()
        self.ask(f"asked to leave by {name}")

    def _lifeline_ended(self, fd: int) -> None:
        if os.read(fd, 1024):
            return
        asyncio.get_running_loop().remove_reader(fd)
        self.drain_limit_seconds = LIFELINE_DRAIN_SECONDS
        self.ask("the supervisor is gone")


async def wait_until_idle(
    ports: Collection[int], tell: Callable[[str], None], count: Callable[[Collection[int]], int] = sockets.connections
) -> None:
    """Return when nobody is connected to ``ports`` any more: without a connection nothing can be in flight.

    ``tell`` gets a sentence whenever the number changes. No limit of its own.
    """
    quiet, told = 0, 0
    while quiet < _QUIET_LOOKS:
        open_connections = count(ports)
        quiet = 0 if open_connections else quiet + 1
        if open_connections and open_connections != told:
            told = open_connections
            tell(f"{told} {'connection' if told == 1 else 'connections'} with requests in flight to close")
        await asyncio.sleep(_LOOK_SECONDS)
