"""Groups of whole texts, each on one thread from beginning to end: to the bit what eager steps give."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of

from anycore.engine.engine import Engine
from anycore_cpu import replay
from anycore_cpu.costs import CAPACITY, GROUP
from anycore_cpu.replay import ReplayStep
from anycore_cpu.texts import grouped


def replaying(made: Engine) -> ReplayStep:
    step = made.runner._step
    assert isinstance(step, ReplayStep)
    return step


def texts(seed: int, most: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(5, 60) for _ in range(chance.choice((1, 2, 17, most)))] for _ in range(40)]


@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "w8a8")])
def test_groups_of_texts_equal_eager_steps(
    t_bert: Path, t_ce: Path, level: str, dtype: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled over all rows, and from the first row with segment ids."""
    kernels_of(level)
    monkeypatch.setenv("ANYCORE_CPU_KERNELS", level)
    monkeypatch.setattr("anycore_cpu.texts.GROUP", 40)
    for folder in (t_bert, t_ce):
        given = {"dtype": dtype} if quantization is None else {"dtype": dtype, "quantization": quantization}
        fast, eager = (engines.engine(folder, **given) for _ in range(2))
        step = replaying(fast)
        step.kernels.set_threads(2)
        eager.runner._step = replaying(eager).step
        for seed in (1, 2):
            found = [engines.run(made, texts(seed, 50)) for made in (fast, eager)]
            assert [str(output) for output in found[0]] == [str(output) for output in found[1]]
        assert step._scripts
        assert None not in step._scripts.values()


def test_where_torch_has_a_part_texts_run_eagerly(t_bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast, eager = (engines.engine(t_bert) for _ in range(2))
    replaying(fast).kernels.set_threads(2)
    eager.runner._step = replaying(eager).step
    for made in (fast, eager):
        made.runner.model.norm = lambda x: (x + x,)  # type: ignore[attr-defined]
    replaying(fast)._scripts.clear()
    found = [engines.run(made, texts(4, 50)) for made in (fast, eager)]
    assert [str(output) for output in found[0]] == [str(output) for output in found[1]]
    assert set(replaying(fast)._scripts.values()) == {None}
    assert "aten.add" in caplog.text


def test_groups_hold_whole_texts_and_all_of_them() -> None:
    chance = random.Random(5)
    for _ in range(200):
        lens = [chance.randrange(1, 512) for _ in range(chance.randrange(2, 60))]
        threads = chance.randrange(1, 9)
        groups = grouped(lens, threads)
        if groups is None:
            continue
        assert groups[0] == 0
        assert groups[-1] == len(lens)
        assert len(groups) > threads
        for first, last in itertools.pairwise(groups):
            assert 0 < sum(lens[first:last]) <= CAPACITY


def test_what_is_not_grouped() -> None:
    assert grouped([128], 1) is None  # one text is recorded by itself
    assert grouped([10, CAPACITY - GROUP + 1], 1) is None  # a text that goes beyond what a group holds
    assert grouped([128, 128], 3) is None  # a thread would have nothing to do
    assert grouped([128, 128, 128], 2) == [0, 2, 3]


def test_rows_that_are_not_one_a_text_are_refused() -> None:
    def batch(*wanted: int) -> Any:
        return type(
            "B",
            (),
            {
                "output_rows": torch.tensor(wanted),
                "query_lens": [2, 3],
                "query_starts_device": torch.tensor([0, 2, 5], dtype=torch.int32),
            },
        )()

    assert replay.one_each(batch(0, 2))
    assert replay.one_each(batch(1, 4))
    assert not replay.one_each(batch(0, 1))
    assert not replay.one_each(batch(2, 0))
    assert not replay.one_each(batch(0))
