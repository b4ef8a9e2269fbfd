"""An event loop whose network is memory: doors listen and connect as ever, and no socket is opened.

``run_on_wires(story)``   runs ``story(loop)``; what listens is reached by ``loop.dial()``, what is dialled shows up
                          in ``loop.dialled`` (every connection that the code under test opened)
``Wire``                  one end of a connection: ``sent`` is what the code under test wrote, ``deliver`` gives it
                          bytes (in pieces, if told to), as far as it reads
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable
from typing import Any


class _Socket:
    """What little is asked of a socket. Its file never has anything to say."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def setsockopt(self, *_: object) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return "memory", 0


class Wire(asyncio.Transport):
    """The transport of one protocol object, and the test's handle on it.

    ``takes`` False: what is written stays in the write buffer, as with a peer that does not read.
    """

    def __init__(self, loop: "WireLoop", protocol: Any) -> None:
        super().__init__()
        self._loop = loop
        self.protocol = protocol
        self.sent = bytearray()
        self.takes = True
        self.reading = True
        self.closing = False
        self.aborted = False
        self.ended = False
        """Our side has said that it sends no more."""
        self.undelivered = bytearray()
        self.delivered = 0
        self._high = 65536
        self._waiting = 0
        self._paused = False
        self._lost = False
        self.on_write: Callable[[], None] = lambda: None
        protocol.connection_made(self)

    # -- what the test does -------------------------------------------------------------------------------

    def deliver(self, data: bytes, sizes: Iterable[int] = ()) -> None:
        """Give the protocol ``data``, as far as it reads; ``sizes`` are those of the first pieces, in a circle."""
        self.undelivered += data
        self._deliver(list(sizes) or [1 << 30])

    def _deliver(self, sizes: list[int]) -> None:
        turn = 0
        while self.undelivered and self.reading and not self._lost and not self.aborted:
            piece = bytes(self.undelivered[: sizes[turn % len(sizes)]])
            del self.undelivered[: len(piece)]
            turn += 1
            self.delivered += len(piece)
            self.protocol.data_received(piece)

    def end(self) -> None:
        """The peer sends no more."""
        if not self._lost and not self.closing and self.protocol.eof_received():
            return
        self.close()

    def take_all(self) -> None:
        """The peer reads again."""
        self.takes = True
        self._waiting = 0
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()

    @property
    def over(self) -> bool:
        return self.closing or self.aborted

    # -- what the protocol does ---------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.over or self.ended:
            return
        self.sent += data
        if not self.takes:
            self._waiting += len(data)
            if self._waiting > self._high and not self._paused:
                self._paused = True
                self.protocol.pause_writing()
        self.on_write()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        if not self.over:
            self.closing = True
            self._lose()

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            self._lose()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._loop.call_soon(self.protocol.connection_lost, None)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if not self.reading:
            self.reading = True
            self._loop.call_soon(self._deliver, [1 << 30])

    def is_reading(self) -> bool:
        return self.reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 65536 if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket(self._loop.silent_fd) if name == "socket" else default


class _Server:
    def __init__(self) -> None:
        self.sockets = [_Socket(0)]

    def close(self) -> None: ...


class WireLoop(asyncio.SelectorEventLoop):
    """See the module. The last thing that listened is what ``dial`` reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled: list[Wire] = []
        self.on_dialled: Callable[[Wire], None] = lambda wire: None
        self._factory: Callable[[], Any] | None = None
        self.silent_fd, self._other_end = os.pipe()

    def close(self) -> None:
        if not self.is_closed():
            os.close(self.silent_fd)
            os.close(self._other_end)
        super().close()

    async def create_server(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:
        self._factory = factory
        return _Server()

    async def create_connection(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:
        protocol = factory()
        wire = Wire(self, protocol)
        self.dialled.append(wire)
        self.on_dialled(wire)
        return wire, protocol

    def dial(self) -> Wire:
        """A caller's connection to what listens."""
        assert self._factory is not None
        return Wire(self, self._factory())


async def turns(count: int = 3) -> None:
    """Let the loop do what it has to do."""
    for _ in range(count):
        await asyncio.sleep(0)


def run_on_wires(story: Callable[[WireLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=WireLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, WireLoop)
        runner.run(story(loop))
