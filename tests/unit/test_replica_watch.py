"""What a replica sees of its Triton while it serves."""

from collections.abc import Callable, Collection
from pathlib import Path

from replicas.watch import Fault, dead_stubs, watch
from tests.virtual_time import run_in_virtual_time


class Script:
    """A server that answers, or has dead stubs, by the number of the look."""

    def __init__(self, *, live: Callable[[int], bool], dead: Callable[[int], Collection[int]]) -> None:
        self._live, self._dead = live, dead
        self.looks = self.stub_looks = 0

    def dead_stubs(self) -> Collection[int]:
        self.stub_looks += 1
        return self._dead(self.stub_looks)

    async def live(self, limit_seconds: float) -> bool:
        self.looks += 1
        return self._live(self.looks)


def test_a_stub_that_stays_dead_is_a_fault_and_one_that_triton_reaps_is_not() -> None:
    async def story() -> None:
        # The first look sees 7 just before it is reaped, the third sees 8 while 9 ends.
        seen = {1: [7], 2: [], 4: [8], 5: [9], 6: [9, 10], 7: [9]}
        server = Script(live=lambda look: True, dead=lambda look: seen.get(look, []))
        fault = await watch(server, lambda sentence: None)
        assert fault.can_drain and "a process of Triton's Python backend died" in fault.reason
        assert server.stub_looks == 7

    run_in_virtual_time(story())


def test_three_misses_in_a_row_are_told_and_the_answer_after_them() -> None:
    """A-035."""

    async def story() -> None:
        told: list[str | None] = []
        quiet = {2, 3, 5, 6, 7, 8, 9}
        server = Script(live=lambda look: look not in quiet and look < 12, dead=lambda look: [])
        fault = await watch(server, told.append)
        assert told == ["Triton hangs: it does not answer", None, "Triton hangs: it does not answer"]
        assert fault == Fault("Triton hangs: it has not answered for 30 s", can_drain=False)

    run_in_virtual_time(story())


def test_dead_stubs_are_zombies_among_the_servers_children(tmp_path: Path) -> None:
    for pid, stat in {
        11: "11 (triton_python_b) S 5 5",
        12: "12 (triton_python_b) Z 5 5",
        13: "13 (sh) Z 5 5",
        14: "14 (a) Z (triton_python_b) R 5 5",
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat)
    for thread, children in {5: "11 12 ", 6: "13 14 99 "}.items():
        (tmp_path / "5/task" / str(thread)).mkdir(parents=True)
        (tmp_path / "5/task" / str(thread) / "children").write_text(children)
    assert dead_stubs(5, tmp_path) == [12]
    assert dead_stubs(4, tmp_path) == []
