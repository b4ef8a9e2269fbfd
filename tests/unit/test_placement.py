"""How a request gets to a replica, whatever its protocol, in virtual time: real pools, connections made of words."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.ingress.placement import Placement
from gateway.routing.pool import Pool, RequestHead
from tests.unit.test_pool import SEG, lease, make, taken, virtual
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaLease

DEADLINE = ErrorKind.DEADLINE


class Connections:
    """A connection is the name of its replica. Those in ``idle`` are open; of the others ``down`` are refused, and
    nothing is heard of them for ``seconds``."""

    def __init__(self, *idle: str, down: tuple[str, ...] = (), seconds: float = 0.1) -> None:
        self.idle = list(idle)
        self.down = down
        self.seconds = seconds

    def take(self, lease: ReplicaLease) -> str | None:
        if lease.id not in self.idle:
            return None
        self.idle.remove(lease.id)
        return lease.id

    def connect(self, lease: ReplicaLease, then: Callable[[str | None], None]) -> None:
        told = None if lease.id in self.down else lease.id
        asyncio.get_running_loop().call_later(self.seconds, then, told)

    def put_back(self, connection: str) -> None:
        self.idle.append(connection)


class Request(Placement[str]):
    """Keeps what becomes of it."""

    CALLER_LEFT = 499

    def __init__(self, pool: Pool, connections: Connections, head: RequestHead = SEG) -> None:
        super().__init__(connections, asyncio.get_running_loop())
        self._pool, self._head, self._deadline = pool, head, head.deadline
        self.sent_to: list[str] = []
        self.error: TidegateError | None = None
        self.counted: list[int] = []
        self.go = self._find_slot
        self.elsewhere = self._elsewhere
        self.follow = self._follow_sequence

    def answered(self) -> None:
        if not self._ended:
            self._give_back(well=True)
            self.counted.append(200)

    def _send_on(self, connection: str) -> None:
        self.sent_to.append(connection)

    def fail(self, error: TidegateError) -> None:
        if not self._ended:
            self.error = error
            self._end(error.row.http, error.kind)

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        self._give_back()
        self.counted.append(status)

    @property
    def kind(self) -> ErrorKind | None:
        return None if self.error is None else self.error.kind


@virtual
async def test_an_open_connection_is_used_at_once_and_another_opened() -> None:
    pool, _ = make()
    pool.update([lease("a")])
    connections = Connections("a")
    first, second = Request(pool, connections), Request(pool, connections)
    first.go()
    second.go()
    assert first.sent_to == ["a"] and not second.sent_to
    await asyncio.sleep(0.2)
    assert second.sent_to == ["a"] and pool.in_flight == 2


@virtual
async def test_one_that_cannot_be_reached_is_left_for_another() -> None:
    pool, _ = make()
    pool.update([lease("a"), lease("b")])
    request = Request(pool, Connections(down=("a",)))
    request.go()
    await asyncio.sleep(1)
    assert request.sent_to == ["b"] and pool.in_flight == 1


@virtual
async def test_a_held_one_goes_on_when_there_is_a_slot() -> None:
    pool, _ = make(max_in_flight_per_replica=1)
    pool.update([lease("a")])
    busy = taken(pool)
    request = Request(pool, Connections("a"))
    request.go()
    await asyncio.sleep(1)
    assert pool.held == 1 and not request.sent_to
    busy.release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert request.sent_to == ["a"] and not pool.held


@pytest.mark.parametrize("when", ["held", "granted", "connecting", "running"])
def test_a_caller_who_leaves_takes_nothing_with_him(when: str) -> None:
    """A-026."""

    @virtual
    async def story() -> None:
        pool, _ = make(max_in_flight_per_replica=1)
        pool.update([lease("a")])
        busy = taken(pool) if when in ("held", "granted") else None
        connections = Connections()
        request = Request(pool, connections)
        request.go()
        if when == "granted" and busy is not None:
            busy.release()
        elif when == "running":
            await asyncio.sleep(0.2)
        request.cancel()
        request.cancel()
        if when == "held" and busy is not None:
            busy.release()
        await asyncio.sleep(1)
        assert request.counted == [499] and pool.in_flight == 0 and not pool.held
        assert connections.idle == (["a"] if when == "connecting" else [])

    story()


@pytest.mark.parametrize(("seconds", "sent"), [(0.05, False), (0.5, True)])
def test_the_deadline_bounds_the_way_and_the_answer(seconds: float, sent: bool) -> None:
    """A-024: a connection that is there too late is not used."""

    @virtual
    async def story() -> None:
        pool, _ = make()
        pool.update([lease("a")])
        request = Request(pool, Connections(), RequestHead("segmenter", seconds))
        request.go()
        await asyncio.sleep(1)
        assert request.kind is DEADLINE and request.sent_to == (["a"] if sent else []) and pool.in_flight == 0

    story()


@virtual
async def test_expired_work_asks_for_no_slot() -> None:
    pool, _ = make()
    pool.update([lease("a")])
    request = Request(pool, Connections("a"), RequestHead("segmenter", 0.0))
    request.go()
    assert request.kind is DEADLINE and not request.sent_to and pool.load().requests_total == 0


@virtual
async def test_the_deadline_of_a_held_one_is_told_once() -> None:
    pool, _ = make()
    pool.update([])
    request = Request(pool, Connections("a"), RequestHead("segmenter", 0.5))
    request.go()
    await asyncio.sleep(1)
    assert request.kind is DEADLINE and request.counted == [504] and "held" in str(request.error)


@virtual
async def test_elsewhere_ejects_only_what_could_not_be_reached() -> None:
    pool, _ = make()
    pool.update([lease("a")])
    request = Request(pool, Connections("a", "a", "a"))
    request.go()
    request.elsewhere(unreached=False)
    assert request.sent_to == ["a", "a"]
    request.elsewhere(unreached=True)
    assert request.sent_to == ["a", "a"] and pool.held == 1
    await asyncio.sleep(1.1)
    assert request.sent_to == ["a", "a", "a"]
