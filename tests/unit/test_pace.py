"""Who is too slow, and for whose fault."""

from gateway.ingress.pace import Pace

STALL = 10.0
LEAST = 10_240.0


def look(pace: Pace, second: float, moved: int, what: object = "body") -> bool:
    return pace.has_stalled(what, second, moved, STALL, LEAST)


def test_a_trickle_stalls_and_a_stream_does_not() -> None:
    trickle, stream = Pace(), Pace()
    assert [second for second in range(25) if look(trickle, second, second)] == [10, 20]
    assert [second for second in range(25) if look(stream, second, second * 2000)] == []


def test_a_stream_that_stops_is_seen_within_two_windows() -> None:
    pace = Pace()
    assert [second for second in range(30) if look(pace, second, min(second, 6) * 2000)] == [20]


def test_time_in_which_nobody_reads_him_does_not_count() -> None:
    pace = Pace()
    assert not look(pace, 0, 0)
    pace.restart()
    assert not look(pace, 100, 0)
    assert not look(pace, 109, 0)
    assert look(pace, 110, 0)


def test_the_next_request_of_a_connection_begins_anew() -> None:
    """The first may have begun a window long ago."""
    pace = Pace()
    assert not look(pace, 0, 0, "first")
    assert not look(pace, 60, 100, "second")
    assert not look(pace, 69, 100, "second")
    assert look(pace, 70, 100, "second")
