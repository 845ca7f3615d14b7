"""Steps with prompts that are replayed: tokens are what they are without, whoever comes beside whom."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import test_desk
from engines import Output, request

from anycore.contract import mixed
from anycore.contract.batch import Batch
from anycore.contract.capture import NotCaptured


class Last:
    """A plan that knows the batch which was put in last."""

    batch: Batch

    def renew(self, batch: Batch) -> None:
        self.batch = batch


class Renewing(test_desk.DeviceLengths):
    """Attention that computes the rows of whichever batch is in the buffers."""

    kinds = 0

    def renewable(self, batch: Batch, decoding: int, prompts: int) -> Last:
        self.kinds += 1
        return Last()

    def attention(self, q: Any, k: Any, v: Any, cache: Any, batch: Batch, *more: Any) -> Any:
        if not isinstance(batch.plan, Last):
            return super().attention(q, k, v, cache, batch, *more)
        last, requests = batch.plan.batch, len(batch.plan.batch.query_lens)
        rows = len(last.input_ids)
        assert batch.slots is not None
        assert batch.block_tables is not None
        assert not batch.slots[rows:].any(), "rows of nobody belong into the scratch block"
        assert not batch.seq_lens_device[requests:].any()
        assert (batch.query_starts_device[requests:] == rows).all()
        real = replace(
            batch, query_lens=last.query_lens, slots=batch.slots[:rows], block_tables=batch.block_tables[:requests]
        )
        real.seq_lens_device = batch.seq_lens_device[:requests]
        out = torch.full_like(q, math.nan)  # of no row that anybody has
        out[:rows] = super().attention(q[:rows], k[:rows], v[:rows], cache, real, *more)
        return out


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "WORTH", math.inf)  # launching is computing here
    monkeypatch.setattr(test_desk, "DeviceLengths", Renewing)


@pytest.mark.parametrize("overlap", [False, True])
def test_who_comes_beside_whom_changes_no_token(t_lm: Path, overlap: bool) -> None:
    plain, _ = test_desk.made(t_lm, overlap=False, desk=False)
    engine, steps = test_desk.made(t_lm, overlap, desk=True)
    wanted, found = test_desk.outputs(plain, 1), test_desk.outputs(engine, 1)
    both = wanted.keys() & found.keys()
    assert len(both) > 20
    for name in both:
        assert found[name].tokens == wanted[name].tokens, name
    recorded = steps[0].mixed._recorded
    assert {rows for rows, _ in recorded} == {16, 24}
    assert None not in recorded.values()


def test_prompt_scores_outlast_the_next_replay(t_lm: Path) -> None:
    def scores(desk: bool) -> list[Any]:
        engine, _ = test_desk.made(t_lm, overlap=True, desk=desk)
        found: dict[str, Output] = {}
        for i in range(6):
            engine.add(request(str(i), [7 + i, 9, 11, 13], max_tokens=3, temperature=0.0, prompt_logprobs=0))
            for delta in engine.step():
                found.setdefault(delta.id, Output()).take(delta)
        while engine.has_work():
            for delta in engine.step():
                found.setdefault(delta.id, Output()).take(delta)
        return [(found[str(i)].tokens, found[str(i)].prompt_logprobs) for i in range(6)]

    assert str(scores(True)) == str(scores(False))


def test_a_device_that_cannot_runs_them_as_they_are(t_lm: Path) -> None:
    engine, steps = test_desk.made(t_lm, overlap=False, desk=True)

    def none(work: Any) -> Any:
        raise NotCaptured("no graphs")

    steps[0].mixed.capture = none
    plain, _ = test_desk.made(t_lm, overlap=False, desk=False)
    wanted, found = test_desk.outputs(plain, 2), test_desk.outputs(engine, 2)
    assert {name: output.tokens for name, output in found.items()} == {n: o.tokens for n, o in wanted.items()}
    assert steps[0].mixed.rows == []


def test_pauses_bring_all_kinds(t_lm: Path) -> None:
    engine, steps = test_desk.made(t_lm, overlap=False, desk=True)
    assert not engine.use_pause()
    plain, _ = test_desk.made(t_lm, overlap=False, desk=False)
    wanted, found = test_desk.outputs(plain, 4), test_desk.outputs(engine, 4)
    while engine.use_pause():
        pass
    assert steps[0].mixed._recorded.keys() == {(16, 6), (24, 6)}
    found = test_desk.outputs(engine, 4)
    assert {name: output.tokens for name, output in found.items()} == {n: o.tokens for n, o in wanted.items()}


def test_ranks_keep_what_one_would_not(t_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have to compute the same rows, and each would measure something else."""
    monkeypatch.setattr(mixed, "WORTH", 0.0)
    for ranks, kept in ((1, 0), (2, 2)):
        engine, steps = test_desk.made(t_lm, overlap=False, desk=True)
        steps[0].mixed.ops = Ranked(steps[0].mixed.ops, ranks)
        test_desk.outputs(engine, 3)
        assert sum(one is not None for one in steps[0].mixed._recorded.values()) == kept


class Ranked:
    """Operations that say how many ranks there are."""

    def __init__(self, ops: Any, ranks: int) -> None:
        self._ops, self.group = ops, SimpleNamespace(size=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)
