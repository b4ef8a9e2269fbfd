"""The decision as stories in virtual time."""

import pytest

from autoscaler.decision.memory import GATEWAY_GONE_SECONDS, Memory
from tests.unit.autoscaler_story import (
    BEGIN,
    DRAINING,
    FAILED,
    STARTING,
    Story,
    gateway,
    replica,
)
from wire.decisions import Reason


class TestLeavingZero:
    def test_a_quiet_pool_stays_at_zero_and_says_what_would_start_it(self) -> None:
        decision = Story().tick()
        assert (decision.target, decision.reason) == (0, Reason.IDLE)
        assert decision.explanation == "0: no demand; one request or job starts a replica"

    @pytest.mark.parametrize(
        "signals",
        [{"lag": 1}, {"pending": 1}, {"gateways": [gateway(held=1)]}, {"gateways": [gateway(held_job=1)]}],
    )
    def test_one_of_anything_is_enough(self, signals: dict[str, object]) -> None:
        """A-047: one lone job or request leaves zero at once."""
        decision = Story().tick(**signals)
        assert (decision.target, decision.reason) == (1, Reason.DEMAND)

    def test_an_activation_is_enough_after_its_caller_has_gone(self) -> None:
        decision = Story().tick(activation=True)
        assert (decision.target, decision.reason) == (1, Reason.ACTIVATION)

    def test_a_burst_starts_what_it_needs_and_no_more_while_that_starts(self) -> None:
        """A-049: backlog 100 at 50 per replica with slow starts is two replicas, at every tick."""
        story = Story(start_seconds=60, target_demand_per_replica=50, max_replicas=20)
        decisions = story.ticks(90, lag=100)
        assert {decision.target for decision in decisions} == {2}
        assert story.starts == 2

    def test_pending_alone_does_not_hide_the_backlog(self) -> None:
        """A-050: one job claimed and 499 waiting are 500."""
        story = Story(target_demand_per_replica=50, max_replicas=8)
        decision = story.tick(lag=499, pending=1)
        assert (decision.target, decision.reason) == (8, Reason.MAX_REPLICAS)
        assert decision.load.backlog == 500
        assert "backlog 500 = 499 waiting + 1 claimed" in decision.explanation

    def test_a_jobs_request_counts_once(self) -> None:
        story = Story(target_demand_per_replica=10)
        decision = story.tick(pending=10, gateways=[gateway(in_flight_job=40)])
        assert (decision.target, decision.load.demand, decision.load.interactive) == (1, 10, 0)

    def test_requests_and_jobs_add_up(self) -> None:
        decision = Story().tick(lag=5, pending=5, gateways=[gateway(held=2, in_flight=3), gateway("g2", in_flight=6)])
        assert (decision.target, decision.load.demand, decision.load.interactive) == (3, 21, 11)


class TestGoingDown:
    def test_the_last_replica_goes_when_idle_for_the_delay(self) -> None:
        story = Story()
        story.ticks(5, lag=1)
        kept = story.tick()
        assert (kept.target, kept.reason, kept.look_again_at) == (1, Reason.RETAIN, story.now + 30)
        assert kept.explanation == "kept at 1: no demand for 0 s; down to 0 in 30 s unless work arrives"
        assert {decision.target for decision in story.ticks(29)} == {1}
        last = story.tick()
        assert (last.target, last.reason) == (0, Reason.IDLE)
        assert last.explanation.startswith("down to 0: no demand for 30 s")

    def test_the_idle_clock_starts_when_the_replica_is_ready(self) -> None:
        """A-042: a start of 15 s with an idle limit of 5 s: one start, the work is done, stop 5 s later."""
        story = Story(start_seconds=15, scale_to_zero_delay_seconds=5)
        story.ticks(15, lag=1)
        story.tick(pending=1)
        assert [decision.target for decision in story.ticks(7)] == [1, 1, 1, 1, 1, 0, 0]
        assert story.starts == 1

    def test_a_start_whose_caller_has_gone_is_not_given_up(self) -> None:
        story = Story(start_seconds=15, scale_to_zero_delay_seconds=5)
        story.tick(activation=True)
        starting = story.ticks(14)
        assert {(decision.target, decision.reason) for decision in starting} == {(1, Reason.STARTING)}
        assert "r1 is still starting" in starting[-1].explanation
        assert [decision.target for decision in story.ticks(6)] == [1, 1, 1, 1, 1, 0]

    def test_requests_between_two_ticks_count_as_activity(self) -> None:
        story = Story()
        story.ticks(3, gateways=[gateway(in_flight=1, total=1, idle=0.0)])
        for tick in range(2, 80):
            assert story.tick(gateways=[gateway(total=tick, idle=0.7)]).target == 1
        for tick in range(80, 150):
            assert story.tick(gateways=[gateway(total=tick)]).target == 1

    def test_a_gateways_idle_time_is_believed_over_ours(self) -> None:
        story = Story()
        story.ticks(3, lag=1)
        story.tick(gateways=[gateway(idle=0.0)])
        assert story.tick(29, gateways=[gateway(idle=10.0)]).reason is Reason.RETAIN
        assert story.tick(20, gateways=[gateway(idle=30.0)]).reason is Reason.IDLE

    def test_several_replicas_go_after_the_window(self) -> None:
        story = Story()
        story.ticks(3, lag=35)
        kept = story.tick(lag=5)
        assert (kept.target, kept.reason) == (4, Reason.SCALE_DOWN_DELAY)
        assert "fewer in 14 s unless demand rises" in kept.explanation
        targets = [decision.target for decision in story.ticks(14, lag=5)]
        assert targets == [4] * 13 + [1]

    def test_the_sentence_fits_the_change(self) -> None:
        """Fewer, though not as few as demand asks for, is not "kept"."""
        story = Story()
        story.ticks(3, lag=35)
        story.ticks(2)
        went_down, then, *_ = [decision for decision in story.ticks(40) if decision.target == 1]
        assert went_down.explanation.startswith("down to 1: no demand for ")
        assert then.explanation.startswith("kept at 1: no demand for ")

    def test_steady_load_gives_a_steady_count(self) -> None:
        """A-048: around a threshold, and as a square wave, nothing swings."""
        story = Story()
        assert {story.tick(lag=13).target for _ in range(300)} == {2}
        noisy = [story.tick(lag=20 + tick % 2).target for tick in range(300)]
        assert set(noisy[1:]) == {3}
        wave = [story.tick(lag=35 if tick % 4 < 2 else 0).target for tick in range(300)]
        assert set(wave) == {4}

    def test_min_replicas_stay(self) -> None:
        story = Story(min_replicas=2)
        decision = story.ticks(100)[-1]
        assert (decision.target, decision.reason) == (2, Reason.MIN_REPLICAS)

    def test_a_replica_that_dies_while_idle_is_not_replaced(self) -> None:
        story = Story()
        story.ticks(3, lag=1)
        story.tick()
        assert story.tick(replicas=[]).target == 0

    def test_a_replica_that_dies_under_load_is(self) -> None:
        story = Story()
        story.ticks(3, lag=15)
        assert story.tick(lag=5, replicas=[replica("r1")]).target == 2

    def test_draining_replicas_are_no_capacity(self) -> None:
        story = Story()
        decision = story.tick(replicas=[replica("old", DRAINING)])
        assert (decision.target, decision.reason) == (0, Reason.IDLE)

    def test_cycles_leave_nothing_behind(self) -> None:
        """A-044, A-045: fifty times up and down; the target is 0 in between and the memory does not grow."""
        story = Story(start_seconds=2)
        for _ in range(50):
            story.ticks(5, lag=25)
            assert story.ticks(60)[-1].target == 0
        assert story.starts == 150
        assert len(story.memory.model_dump_json()) < 1000


class TestUnknownIsNotZero:
    @pytest.mark.parametrize(
        "unknown", [{"lag": None}, {"pending": None}, {"gateways": None}, {"gateways": []}, {"activation": None}]
    )
    def test_an_unknown_signal_never_shrinks(self, unknown: dict[str, object]) -> None:
        """A-051, A-053: three replicas stay, and the reason says so with its age."""
        story = Story()
        story.ticks(3, lag=25)
        decisions = story.ticks(25, **unknown)
        assert {(decision.target, decision.reason) for decision in decisions} == {(3, Reason.UNKNOWN_SIGNAL)}
        assert decisions[-1].explanation.startswith("kept at 3: unknown for 24 s: ")
        assert story.tick().target == 3, "what was kept counts as wanted for the scale-down delay"
        assert story.ticks(15)[-1].target == 1

    def test_it_may_grow_on_what_is_known(self) -> None:
        story = Story()
        decision = story.tick(lag=None, pending=3, gateways=[gateway(held=18)])
        assert (decision.target, decision.reason) == (3, Reason.DEMAND)
        assert "unknown: backlog of pages" in decision.explanation

    def test_job_requests_stand_in_for_an_unknown_backlog(self) -> None:
        assert Story().tick(lag=None, gateways=[gateway(held_job=12)]).target == 2

    def test_at_zero_it_stays_unless_asked(self) -> None:
        """A-052 without a fallback: the documented hold."""
        story = Story()
        held = story.tick(lag=None)
        assert (held.target, held.reason) == (0, Reason.UNKNOWN_SIGNAL)
        assert held.explanation.startswith("stays at 0: unknown for 0 s: backlog of pages")
        assert story.tick(lag=None, activation=True).target == 1

    def test_unreadable_states_keep_the_count(self) -> None:
        story = Story()
        story.ticks(3, lag=15)
        decision = story.tick(60, replicas=[replica("r1", None), replica("r2", None)])
        assert (decision.target, decision.reason) == (2, Reason.UNKNOWN_SIGNAL)

    def test_an_unreadable_backend_keeps_the_target(self) -> None:
        story = Story()
        story.ticks(3, lag=15)
        assert story.tick(60, replicas=None).target == 2

    def test_a_gateway_that_falls_silent_is_unknown_then_gone(self) -> None:
        story = Story(scale_to_zero_delay_seconds=1)
        story.ticks(3, gateways=[gateway(in_flight=5)])
        other = [gateway("g2", idle=100.0)]
        silent = story.ticks(GATEWAY_GONE_SECONDS - 1, gateways=other)
        assert {decision.reason for decision in silent} == {Reason.UNKNOWN_SIGNAL}
        assert "load of gateway g1" in silent[-1].explanation
        assert story.ticks(3, gateways=other)[-1].target == 0

    def test_a_gateway_that_drained_is_gone_at_once(self) -> None:
        story = Story(scale_to_zero_delay_seconds=1)
        story.ticks(3, gateways=[gateway(in_flight=1)])
        story.tick(gateways=[gateway(draining=True)])
        assert story.tick(gateways=[]).reason is Reason.IDLE

    def test_before_the_first_gateway_nothing_is_known(self) -> None:
        """A new memory beside running replicas: perhaps a gateway is only slow."""
        story = Story(scale_to_zero_delay_seconds=1)
        running = [replica("old", ready_at=BEGIN - 1000)]
        assert story.tick(gateways=[], replicas=running).reason is Reason.UNKNOWN_SIGNAL
        assert story.tick(GATEWAY_GONE_SECONDS, gateways=[], replicas=running).reason is Reason.IDLE


class TestRestart:
    def test_a_restart_forgets_nothing(self) -> None:
        story = Story()
        story.ticks(3, lag=1)
        story.ticks(20)
        story.restart()
        assert [decision.target for decision in story.ticks(11)] == [1] * 10 + [0]

    def test_a_new_memory_adopts_what_runs(self) -> None:
        story = Story()
        running = [replica(f"old{n}", ready_at=BEGIN - 900) for n in range(3)]
        first = story.tick(replicas=running)
        assert (first.target, first.reason) == (3, Reason.SCALE_DOWN_DELAY)

    def test_an_old_memory_starts_nothing(self) -> None:
        story = Story()
        story.ticks(3, lag=35)
        story.restart()
        decision = story.tick(2, gateways=[], replicas=[])
        assert (decision.target, decision.reason) == (0, Reason.UNKNOWN_SIGNAL)


class TestFailingStarts:
    def test_failures_back_off_and_are_told(self) -> None:
        story = Story()
        pauses = []
        for number in range(1, 10):
            name = f"r{number}"
            story.memory = story.memory.with_scaled((name,), ())
            decision = story.tick(0.1, lag=1, replicas=[], endings=[(name, "exit status 3: no such model")])
            assert not decision.may_start
            assert decision.target == 1
            assert decision.look_again_at is not None
            pauses.append(round(decision.look_again_at - story.now))
            story.now = decision.look_again_at
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert decision.explanation.endswith(
            "the last 9 starts failed (exit status 3: no such model), next try in 60 s"
        )

    def test_a_success_ends_it(self) -> None:
        story = Story(start_seconds=3)
        story.tick(lag=1)
        story.tick(lag=1, replicas=[replica("r1", FAILED)])
        assert story.memory.failed_starts == 1
        story.started_at.clear()
        story.ticks(10, lag=1)
        assert (story.memory.failed_starts, story.memory.retry_at) == (0, None)

    def test_a_stopped_start_has_not_failed(self) -> None:
        story = Story(start_seconds=60)
        story.ticks(2, lag=15)
        story.ticks(30, lag=5)
        assert len(story.started_at) == 1
        assert story.memory.failed_starts == 0
        assert story.memory.starting == ("r1",)

    def test_a_failing_start_is_dropped_with_its_demand(self) -> None:
        story = Story()
        story.tick(lag=1)
        story.tick(lag=1, replicas=[])
        story.started_at.clear()
        assert story.tick(10).target == 0

    def test_an_adopted_start_that_dies_counts(self) -> None:
        story = Story()
        story.tick(lag=1, replicas=[replica("adopted", STARTING)])
        story.tick(lag=1, replicas=[])
        assert story.memory.failed_starts == 1


def test_a_clock_that_goes_back_blocks_nothing() -> None:
    """The store fails over to a host whose clock is an hour behind."""
    story = Story()
    story.ticks(3, lag=1)
    story.memory = story.memory.with_failed_start("exit status 1", story.now)
    story.now -= 3600
    story.started_at["r1"] = story.now
    assert not story.tick(lag=1).may_start
    assert story.tick(60, lag=1).may_start
    assert story.ticks(100)[-1].target == 0


def test_memory_survives_json() -> None:
    story = Story()
    story.ticks(3, lag=25)
    assert Memory.model_validate_json(story.memory.model_dump_json()) == story.memory
