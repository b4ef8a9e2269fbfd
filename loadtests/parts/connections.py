"""Ten thousand callers that stay connected and say nothing, then traffic."""

import resource
import socket
import time

from loadtests.measured import Side
from loadtests.processes import rss_bytes
from loadtests.report import Outcome, at_most
from loadtests.setup import Setup
from loadtests.work import Work, http_echo

NAME = "connections"
_COUNT = 10_000
_IDLE_SECONDS = 3.0
_CALLERS = 64
_SECONDS = 3.0
_LIMIT_KB = 20.0


def measure(setup: Setup) -> Outcome:
    outcome, work = Outcome(NAME), http_echo(16)
    sides = setup.sides[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for side in sides:
        setup.generator.run(work, side, connections=_CALLERS, seconds=1.0)  # what one time costs is not counted
        connections = _Connections(work, side, _COUNT)
        try:
            # Memory freed earlier serves the first of them, so the second half tells what one takes.
            failures = connections.call_all(_COUNT // 2)
            half = _rss(side)
            failures += connections.call_all()
            time.sleep(_IDLE_SECONDS)
            each_kb = (_rss(side) - half) / (_COUNT - _COUNT // 2) / 1e3
            traffic = setup.generator.run(work, side, connections=_CALLERS, seconds=_SECONDS)
            failures += traffic.failures + connections.call_all()
        finally:
            connections.close()
        name = f"{_COUNT:,} idle connections: {side.name}"
        if side.name == "gateway":
            outcome.target(f"{name} memory each", [each_kb], "kB", at_most(_LIMIT_KB))
            outcome.target(f"{name} failures", [failures], "requests", at_most(0))
        else:
            outcome.figure(f"{name} memory each", [each_kb], "kB")
            outcome.figure(f"{name} failures", [failures], "requests")
        outcome.figure(f"{name} requests/s of {_CALLERS} more", [traffic.per_second], "requests/s")
        outcome.figure(f"{name} p99 of {_CALLERS} more", [traffic.p99_seconds * 1e3], "ms")
    return outcome


class _Connections:
    """Plain blocking sockets, one request on one of them at a time: the client costs next to nothing."""

    def __init__(self, work: Work, side: Side, count: int) -> None:
        host, port = side.http.rsplit(":", 1)
        headers = "".join(f"{name}: {value}\r\n" for name, value in work.headers)
        body = work.bodies[0]
        head = f"POST {work.path} HTTP/1.1\r\nHost: {side.http}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._address = (host, int(port))
        self._sockets: list[socket.socket | None] = [None] * count

    def call_all(self, first: int | None = None) -> int:
        """One request on each (of the ``first``), in turn, connecting where none is yet; how many failed."""
        return sum(not self._call(place) for place in range(len(self._sockets[:first])))

    def close(self) -> None:
        for one in self._sockets:
            if one is not None:
                one.close()

    def _call(self, place: int) -> bool:
        try:
            connection = self._sockets[place]
            if connection is None:
                connection = self._sockets[place] = socket.create_connection(self._address, timeout=10.0)
            connection.sendall(self._request)
            return connection.recv(65536).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


def _rss(side: Side) -> int:
    return sum(rss_bytes(pid) for pid in side.pids)
