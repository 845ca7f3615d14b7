"""Who is refused is told when to come back, by how fast sequences have ended while there was work."""

from __future__ import annotations

from anycore.engine.pace import LONGEST, WINDOW, Pace


def test_nothing_measured_is_a_second() -> None:
    pace = Pace()
    assert pace.seconds_for(100) == 1
    pace.step(0.0, 0, busy=True)
    pace.step(50.0, 0, busy=True)
    assert pace.seconds_for(100) == 1  # busy, but none has ended yet


def test_waiting_grows_with_the_queue_and_is_told_in_whole_seconds() -> None:
    pace = Pace()
    pace.step(0.0, 0, busy=True)
    pace.step(10.0, 4, busy=True)
    assert [pace.seconds_for(number) for number in (0, 1, 2, 3, 4)] == [1, 3, 5, 8, 10]
    assert pace.seconds_for(10**6) == LONGEST


def test_idle_time_does_not_count() -> None:
    pace = Pace()
    for begin in (0.0, 1000.0):
        pace.step(begin, 0, busy=True)
        pace.step(begin + 5, 1, busy=False)
    assert pace.seconds_for(1) == 5


def test_what_is_long_ago_is_forgotten() -> None:
    pace, now = Pace(), 0.0
    pace.step(now, 0, busy=True)
    for seconds, steps in ((WINDOW / 10, 10), (WINDOW / 2, 20)):  # it becomes five times slower
        for _ in range(steps):
            now += seconds
            pace.step(now, 1, busy=True)
    assert pace.seconds_for(1) in (WINDOW / 2 - 1, WINDOW / 2)
