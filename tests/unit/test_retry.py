"""The retry policy of workers: which failures, what gaps, when to give up."""

import pytest

from wire.errors import ERRORS, ErrorKind
from workers.retry import MOST_LOST_REPLICAS, Attempts, CallFailure, GiveUp, Retry, next_step


def _failure(kind: ErrorKind | None, status: int | None = None, after: float | None = None) -> CallFailure:
    return CallFailure(ERRORS[kind].http if kind else status, kind, "no", after)


def _step(failure: CallFailure, *, made: int = 1, remaining: float = 60.0, dice: float = 0.5) -> Retry | GiveUp:
    return next_step(Attempts(made=made), failure, remaining, dice)


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_the_table_and_who_is_at_fault_say_what_is_worth_another_try(kind: ErrorKind) -> None:
    not_of_the_job = (ErrorKind.REPLICA_LOST, ErrorKind.UNAUTHENTICATED, ErrorKind.FORBIDDEN)
    wanted = ERRORS[kind].retryable or kind in not_of_the_job
    assert isinstance(_step(_failure(kind)), Retry) is wanted


@pytest.mark.parametrize(("status", "wanted"), [(None, True), (503, True), (400, False), (404, False), (500, False)])
def test_no_answer_and_tritons_full_queue_are_worth_another_try(status: int | None, wanted: bool) -> None:
    assert isinstance(_step(_failure(None, status)), Retry) is wanted


def test_gaps_double_up_to_a_bound_and_are_spread() -> None:
    gaps = [_step(_failure(None), made=made, dice=0.0) for made in (1, 2, 3, 20, 100_000)]
    assert gaps == [Retry(0.05), Retry(0.1), Retry(0.2), Retry(2.5), Retry(2.5)]
    assert _step(_failure(None), dice=1.0) == Retry(0.1)


def test_the_announced_time_is_waited_for_and_then_not_all_come_at_once() -> None:
    """A-022: no more than a fifth of those that were refused together come within any 100 ms."""
    assert _step(_failure(ErrorKind.NO_REPLICA, after=7.0), dice=0.0) == Retry(7.0)
    assert _step(_failure(ErrorKind.NO_REPLICA, after=7.0), dice=0.9) == Retry(7.9)


def test_a_try_that_would_come_too_late_is_not_made() -> None:
    assert _step(_failure(ErrorKind.NO_REPLICA, after=7.0), remaining=7.0) == GiveUp(out_of_time=True)
    assert _step(_failure(None), remaining=-1.0) == GiveUp(out_of_time=True)


def test_a_call_that_costs_replica_after_replica_is_given_up() -> None:
    """A-079: a job that kills whatever runs it must not take the pool down."""
    attempts = Attempts()
    steps = []
    for _ in range(MOST_LOST_REPLICAS):
        failure = _failure(ErrorKind.REPLICA_LOST)
        attempts = attempts.after(failure)
        steps.append(type(next_step(attempts, failure, 60.0, 0.0)))
    assert steps == [Retry, Retry, GiveUp]
    assert attempts == Attempts(made=3, lost_replicas=3)


STUB_DEAD = CallFailure(500, None, "Stub process 'segmenter_0_0' is not healthy.")


def test_a_replica_that_says_it_is_broken_is_left_time_to_leave() -> None:
    """Triton keeps saying so until the replica has left; asking the same one again in a moment is no other try."""
    assert _step(STUB_DEAD) == Retry(3.0)
    assert _step(STUB_DEAD, remaining=2.0) == GiveUp(out_of_time=True)
    assert _step(
        CallFailure(500, None, "in ensemble 'e', Stub process is unhealthy and it will be restarted.")
    ) == Retry(3.0)
    assert _step(CallFailure(500, ErrorKind.INTERNAL, "Stub process 'a' is not healthy.")) == GiveUp()
    assert _step(CallFailure(400, None, "no input 'Stub process x is not healthy'")) == GiveUp()


def test_a_request_that_breaks_replica_after_replica_is_given_up() -> None:
    """A-079: the answer does not say who broke it, so each counts."""
    attempts, steps = Attempts(), []
    for _ in range(MOST_LOST_REPLICAS):
        attempts = attempts.after(STUB_DEAD)
        steps.append(type(next_step(attempts, STUB_DEAD, 60.0, 0.0)))
    assert steps == [Retry, Retry, GiveUp]
