"""What the engine counts of its steps, for the metrics of a server."""

from __future__ import annotations

from pathlib import Path

from engines import engine, finish, request

from anycore.contract.declare import Task
from anycore.engine.stats import STEP_TOKENS, Distribution


def test_a_value_is_counted_under_the_first_bound_that_it_does_not_exceed() -> None:
    counts = Distribution([0, 0, 0])
    for value in (1, 8, 9, 8, 2):
        counts.add(value, (1, 8))
    assert counts == Distribution([1, 3, 1], total=28)


def test_steps_are_counted_by_tokens_and_sequences(t_lm: Path) -> None:
    made = engine(t_lm)
    made.add(request("a", [5] * 10, max_tokens=3))
    made.add(request("b", [7] * 9, max_tokens=3))
    finish(made)
    stats = made.stats()
    assert stats.steps == 3  # both prompts, then a token of each, twice
    assert stats.step_tokens.total == 19 + 2 + 2
    assert stats.step_tokens.counts[STEP_TOKENS.index(32)] == 1
    assert stats.step_tokens.counts[STEP_TOKENS.index(8)] == 2
    assert stats.step_sequences.total == 6
    assert sum(stats.step_sequences.counts) == sum(stats.step_tokens.counts) == 3
    assert stats.padding_tokens == 0


def test_pooled_steps_are_counted_too(t_bert: Path) -> None:
    made = engine(t_bert, task="embed")
    for i in range(4):
        made.add(request(str(i), [5] * (3 + i), Task.EMBED))
    finish(made)
    assert made.stats().step_sequences.total == 4
    assert made.stats().step_tokens.total == 3 + 4 + 5 + 6


def test_requests_that_wait_for_a_prefix_are_told_apart(t_lm: Path) -> None:
    made = engine(t_lm)
    for name in "abc":
        made.add(request(name, list(range(5, 85))))
    made.step()
    assert (made.stats().waiting, made.stats().deferred) == (2, 2)  # the first one is computing it
    finish(made)
    assert (made.stats().waiting, made.stats().deferred) == (0, 0)


def test_the_last_delta_tells_how_often_the_sequence_was_preempted(t_lm: Path) -> None:
    made = engine(t_lm, kv_cache_memory=None, max_model_len=96, max_num_seqs=4, enable_prefix_caching=False)
    assert made.pool is not None
    taken = made.pool.take(made.pool.free - 8)  # 128 tokens are left
    for name in "abc":
        made.add(request(name, [5] * 16, max_tokens=40))
    told = {}
    while made.has_work():
        told |= {delta.id: delta.preemptions for delta in made.step() if delta.finish}
    made.pool.release(taken)
    assert sum(told.values()) == made.stats().preemptions > 0
    assert told["a"] == 0
