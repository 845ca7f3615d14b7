"""Requests that decode are counted together; each tells its own numbers, and keeps them when it leaves."""

from __future__ import annotations

from sequences import sequence

from anycore.engine.decodes import Decodes
from anycore.engine.sequence import Request


def prefilled(number: int, prompt: int) -> Request:
    """A request whose prompt is computed and whose first token is under way."""
    request = sequence(number, [1] * prompt)
    request.seat, request.num_computed, request.num_tokens = number, prompt, prompt + 1
    return request


def test_a_step_counts_for_all_and_changes_none_that_was_made_before() -> None:
    decodes = Decodes(4)
    first, other = prefilled(2, 5), prefilled(0, 9)
    decodes.keep(first, 7)
    decodes.keep(other, 20)
    requests, seats = decodes.requests, decodes.seats
    assert decodes.advance().tolist() == [5, 9]
    assert [(r.num_computed, r.num_tokens) for r in requests] == [(6, 7), (10, 11)]
    decodes.drop(other)
    decodes.drop(other)
    assert decodes.advance().tolist() == [6]
    assert (requests, seats.tolist()) == ([first, other], [2, 0]), "what a step holds stays as it was"
    assert (other.num_computed, other.num_tokens) == (10, 11)
    other.num_computed = 0
    assert decodes.requests == [first]


def test_who_has_come_to_its_end_is_due_until_it_is_kept_or_dropped() -> None:
    decodes = Decodes(2)
    request = prefilled(1, 3)
    decodes.keep(request, 4)
    assert decodes.due() == []
    decodes.advance()
    assert decodes.due() == decodes.due() == [request]
    decodes.keep(request, 8)
    assert (decodes.due(), decodes.requests) == ([], [request])
    assert request.num_computed == 4
