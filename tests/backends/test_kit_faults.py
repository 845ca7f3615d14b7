"""The kit's checks of a whole engine must fail where a backend, or the engine on it, forgets, leaks or dissembles."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anycore.contract import endtoend, endtoend_faults
from anycore.contract.backend import Backend, KVSpec, Limits, StepFn, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.ops import Ops
from anycore.engine.blocks import BlockPool
from anycore.engine.committer import Committer
from anycore.engine.engine import Engine
from anycore.plugins import load
from anycore_cpu.memory import CpuMemory

Check = Callable[[str, str, Path], None]


class Plain(Backend):
    """A right backend: the contract's defaults on the CPU's memory."""

    self_check = False  # it would find these, too: here the kit is on trial
    name = "mutant"
    ops_type: type[Ops] = Ops
    memory_type = CpuMemory

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), self.memory_type(), self.ops_type())


class ReadsPastTheEnd(Ops):
    """A weight of 0 meets whatever stands behind the last token of a block."""

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Any, batch: Batch, *others: Any, **named: Any
    ) -> Tensor:
        out = super().attention(q, k, v, cache, batch, *others, **named)
        if cache is not None:
            assert batch.block_tables is not None
            for i, (start, rows) in enumerate(zip(batch.query_starts, batch.query_lens, strict=False)):
                last = batch.block_tables[i, (batch.seq_lens[i] - 1) // batch.block_size]
                out[start : start + rows] += 0.0 * cache[1][last].sum()
        return out


class Careless(Plain):
    ops_type = ReadsPastTheEnd


class Fickle(Ops):
    """Draws with numbers of its own."""

    def sample(self, logits: Tensor, params: Sampling) -> Samples:
        uniforms = torch.rand(len(logits), dtype=params.uniforms.dtype)
        return super().sample(logits, replace(params, uniforms=uniforms))


class Gambler(Plain):
    ops_type = Fickle


class Hoarder(Plain):
    """Keeps what every step was given."""

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        kept = []

        def kept_step(batch: Batch, sampling: Sampling | None) -> Any:
            kept.append(batch.positions.clone())
            return step(batch, sampling)

        return kept_step


class GreedyMemory(CpuMemory):
    """Takes three times what a cache needs."""

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        self.more = torch.empty(2 * blocks * self.block_bytes(kv), dtype=torch.uint8)
        return super().allocate_kv(kv, blocks)


class Glutton(Plain):
    memory_type = GreedyMemory


def planned(backend: str, dtype: str, folder: Path) -> None:
    endtoend_faults.check_planned(endtoend.load().backend(backend).open(0), dtype, folder)


def install(monkeypatch: pytest.MonkeyPatch, kind: type[Plain]) -> None:
    loaded = load()
    spec = replace(loaded.backend("cpu"), name="mutant", open=lambda index: kind())
    monkeypatch.setattr(endtoend, "load", lambda: replace(loaded, backends=(spec,)))


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (endtoend_faults.check_sick, Careless),
        (endtoend_faults.check_repeats, Gambler),
        (endtoend_faults.check_leaks, Hoarder),
        (planned, Glutton),
    ],
)
def test_kit_catches_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check, kind: type[Plain]) -> None:
    if check is endtoend_faults.check_sick:
        endtoend_faults.save_sick_decoder(tmp_path, 16)
    else:
        endtoend.save_decoder(tmp_path, 16)
    install(monkeypatch, Plain)
    check("mutant", "float32", tmp_path)
    install(monkeypatch, kind)
    with pytest.raises(AssertionError):
        check("mutant", "float32", tmp_path)


def loses_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One release in twenty is forgotten."""
    release, chosen = BlockPool.release, random.Random(0)

    def forgetful(pool: BlockPool, blocks: Any) -> None:
        if chosen.random() > 0.05:
            release(pool, blocks)

    monkeypatch.setattr(BlockPool, "release", forgetful)


def swaps_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go to their neighbours when there are three."""
    generated = Committer._generated

    def swapped(committer: Committer, results: Any) -> Any:
        if len(results.tokens) == 3:
            results.tokens = results.tokens[1:] + results.tokens[:1]
        return generated(committer, results)

    monkeypatch.setattr(Committer, "_generated", swapped)


def overlooks_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not finite is taken for a result."""
    generated = Committer._generated

    def blind(committer: Committer, results: Any) -> Any:
        results.finite = [True] * len(results.finite)
        return generated(committer, results)

    monkeypatch.setattr(Committer, "_generated", blind)


def hides_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device ends all requests without a word."""
    step = Engine.step

    def quiet(engine: Engine) -> Any:
        try:
            return step(engine)
        except endtoend_faults.DeviceLost:
            for name in list(engine._live.requests):
                engine.abort(name)
            return []

    monkeypatch.setattr(Engine, "step", quiet)


@pytest.mark.parametrize(
    ("check", "mistake"),
    [
        (endtoend_faults.check_disturbed, loses_blocks),
        (endtoend_faults.check_disturbed, swaps_tokens),
        (endtoend_faults.check_sick, overlooks_nan),
        (endtoend_faults.check_lost, hides_losses),
    ],
)
def test_kit_catches_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check, mistake: Callable[[pytest.MonkeyPatch], None]
) -> None:
    if check is endtoend_faults.check_sick:
        endtoend_faults.save_sick_decoder(tmp_path, 16)
    else:
        endtoend.save_decoder(tmp_path, 16)
    install(monkeypatch, Plain)
    check("mutant", "float32", tmp_path)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check("mutant", "float32", tmp_path)
