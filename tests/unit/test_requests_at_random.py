"""Requests whose callers leave, whose replicas refuse, die, drain and come back, at random moments: whatever happens,
each ends once, and nothing is left behind (A-026)."""

import asyncio
import random

import pytest

from gateway.ingress.placement import Connections as Way
from gateway.ingress.recovery import Recovery
from gateway.routing.pool import Pool, RequestHead
from gateway.routing.sequences import SequencePart
from tests.unit.test_placement import Connections
from tests.unit.test_pool import lease, make, virtual
from tests.unit.test_sequences import Store, catalogue
from wire.errors import ErrorKind, TidegateError
from wire.membership import ReplicaState

LOST = TidegateError(ErrorKind.REPLICA_LOST, "lost")


class Request(Recovery[str]):
    """One that can be taken back as long as it has no answer."""

    CALLER_LEFT = 499

    def __init__(self, pool: Pool, connections: Way[str], head: RequestHead) -> None:
        super().__init__(connections, asyncio.get_running_loop())
        self._pool, self._head, self._deadline = pool, head, head.deadline
        self.on_replica = False
        self.ends: list[int | ErrorKind] = []

    def begin(self, part: SequencePart | None) -> None:
        if part is None:
            self._find_slot()
        else:
            self._follow_sequence(part)

    def _send_on(self, connection: str) -> None:
        self.on_replica = True
        if self._pool.faults.first_byte_limit_seconds:
            self._await_first_byte()

    def _take_back(self) -> bool:
        self.on_replica = False
        self._on_first_byte()
        return True

    def happen(self, dice: random.Random) -> None:
        """Something, on its replica."""
        self._on_first_byte()
        what = dice.randrange(4)
        if what == 0:
            self.on_replica = False
            self._repeat_unless_died(LOST)
        elif what == 1 and self._move():
            return
        else:
            self._end(200, None)

    def fail(self, error: TidegateError) -> None:
        if not self._ended:
            self._end(error.row.http, error.kind)

    def _end(self, status: int, own_error: ErrorKind | None) -> None:
        self._give_back(well=status == 200)
        self.on_replica = False
        self.ends.append(own_error or status)


@pytest.mark.parametrize("seed", range(12))
def test_each_ends_once_and_nothing_is_left_behind(seed: int) -> None:
    @virtual
    async def story() -> None:
        broken: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        dice = random.Random(seed)
        pool, _ = make(
            max_in_flight_per_replica=3, hold_limit_seconds=5, first_byte_limit_seconds=dice.choice((0, 0.3))
        )
        pool.faults.repeatable = frozenset(("classifier",))
        pool.sequences.places = Store()
        pool.sequences.on_catalogue(catalogue())
        connections = Connections(seconds=0.02)
        requests: list[Request] = []

        async def one(number: int) -> None:
            await asyncio.sleep(dice.random() * 10)
            model = dice.choice(("segmenter", "classifier"))
            deadline = asyncio.get_running_loop().time() + dice.choice((0.1, 1, 100))
            request = Request(pool, connections, RequestHead(model, deadline))
            requests.append(request)
            start, end = dice.random() < 0.4, dice.random() < 0.3
            request.begin(SequencePart(model, f"n:{number % 7}", start, end) if model == "segmenter" else None)
            while not request.ends:
                await asyncio.sleep(dice.random() * 0.3)
                if dice.random() < 0.1:
                    request.cancel()
                elif request.on_replica and dice.random() < 0.7:
                    request.happen(dice)

        async def replicas() -> None:
            for _ in range(60):
                await asyncio.sleep(dice.random() * 0.4)
                states = [ReplicaState.READY] * 4 + [ReplicaState.DRAINING, ReplicaState.FAILED]
                pool.update([lease(each, dice.choice(states)) for each in "abcd" if dice.random() < 0.8])
                connections.down = tuple(each for each in "abcd" if dice.random() < 0.15)
            pool.update([lease(each) for each in "abcd"])

        await asyncio.gather(replicas(), *(one(number) for number in range(150)))
        await asyncio.sleep(60)
        assert not broken
        assert all(len(request.ends) == 1 for request in requests)
        assert not pool.in_flight and not pool.held and not len(pool.sequences)
        assert not pool.load().in_flight_by_replica
        assert sum(request.ends == [200] for request in requests) > 40

    story()
