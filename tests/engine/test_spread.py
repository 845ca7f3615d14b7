"""long-first: prompts are spread over the steps in which others decode, and no answer ends later for it."""

from __future__ import annotations

from sequences import sequence

from anycore.engine.request import Request
from anycore.engine.spread import rows_due


def under_way(output: int) -> Request:
    """A request that has its first token, and `output` to come."""
    request = sequence(0, [1] * 8, output + 1)
    request.tokens.append(2)
    request.prefilled = True
    return request


def test_room_is_what_the_longest_answer_takes_longer() -> None:
    running = [under_way(40), under_way(100)]
    assert rows_due(running, []) == 0
    assert rows_due(running, [sequence(1, [1] * 50, output=50)]) == 1
    assert rows_due(running, [sequence(1, [1] * 50, output=90)]) == 5
    assert rows_due(running, [sequence(1, [1] * 50, output=100)]) == 50, "as long as what runs: at once"
    assert rows_due(running, [sequence(1, [1] * 50, output=150)]) == 50
    assert rows_due([], [sequence(1, [1] * 50, output=10)]) == 50


def test_the_one_with_the_least_room_decides_and_those_ahead_of_it_count() -> None:
    waiting = [sequence(1, [1] * 30, output=90), sequence(2, [1] * 10, output=80), sequence(3, [1] * 400, output=60)]
    assert rows_due([under_way(100)], waiting) == 11  # 440 rows in 40 steps
    assert rows_due([under_way(100)], waiting[:2]) == 3  # 30 rows in 10 steps


def test_prompts_that_were_begun_count_with_what_is_left_of_them() -> None:
    begun = sequence(1, [1] * 50, output=80)
    begun.num_computed = 30
    assert rows_due([under_way(100), begun], []) == 1
    begun.num_computed = 0
    assert rows_due([under_way(100), begun], []) == 3
