"""Decode steps that lie on a desk: tokens are what they are without one, whoever joins, leaves or is preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Output, request
from reference import CPU, HostMemory

from anycore.contract.backend import Backend, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.capture import Replay
from anycore.contract.declare import Task
from anycore.contract.desk import Desk
from anycore.contract.graphs import GraphStep
from anycore.contract.ops import Ops
from anycore.contract.pinned import PinnedMemory
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.engine import Engine
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.models import loader
from anycore.models.source import Source
from anycore.models.spec import read_spec

LIMITS = Limits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, block_size=4, blocks=26)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 9},
    {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.0, "bad_words_ids": ((7, 8),)},
]


def capture(work: Any) -> tuple[Replay, StepOutput]:
    """A graph's stand-in: the recorded work runs again on the same buffers and leaves its results where they were."""
    kept = work()

    def replay(batch: Any) -> None:
        again = work()
        kept.rows.copy_(again.rows)
        if kept.samples is not None:
            for name in ("ids", "finite", "together"):
                getattr(kept.samples, name).copy_(getattr(again.samples, name))

    return replay, kept


class DeviceLengths(Ops):
    """Attention that takes lengths from the device, as what is captured must."""

    def attention(self, q: Any, k: Any, v: Any, cache: Any, batch: Batch, *more: Any) -> Any:
        lens = batch.seq_lens_device.tolist()
        contexts = [length - rows for length, rows in zip(lens, batch.query_lens, strict=True)]
        return super().attention(q, k, v, cache, replace(batch, context_lens=contexts), *more)


def made(folder: Path, overlap: bool, desk: bool) -> tuple[Engine, list[GraphStep]]:
    source = Source(str(folder), folder)
    spec = read_spec(source).for_task(Task.GENERATE)
    backend, steps = Backend(CPU, HostMemory(CPU), DeviceLengths()), []
    backend.overlap = overlap

    def optimize(step: Any, limits: Limits) -> GraphStep:
        steps.append(GraphStep(step, backend.ops, limits, backend.device, capture))
        return steps[0]

    if desk:
        backend.optimize = optimize  # type: ignore[method-assign]
    model = loader.load(source, spec, backend, "float32")
    kv = backend.memory.allocate_kv(spec.kv(LIMITS.block_size, "float32"), LIMITS.blocks)
    runner = Runner(model, backend, Task.GENERATE, LIMITS, kv)
    return Engine(runner, Scheduler(LIMITS, BlockPool(LIMITS.blocks, LIMITS.block_size)), LIMITS, seed=3), steps


def outputs(engine: Engine, seed: int) -> dict[str, Output]:
    """Requests of all kinds that come in the middle of others; every fifth is given up after some steps."""
    rng = random.Random(seed)
    found: dict[str, Output] = {}
    for i in range(30):
        prompt = [rng.randrange(5, 400) for _ in range(rng.randrange(1, 30))]
        engine.add(request(str(i), prompt, max_tokens=rng.randrange(1, 30), seed=i, **KINDS[rng.randrange(len(KINDS))]))
        for _ in range(rng.randrange(4)):
            for delta in engine.step():
                found.setdefault(delta.id, Output()).take(delta)
        if i % 5 == 4:
            engine.abort(str(i - 1))
            found.pop(str(i - 1), None)
    while engine.has_work():
        for delta in engine.step():
            found.setdefault(delta.id, Output()).take(delta)
    assert engine.pool is not None
    engine.pool.check()
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_who_comes_and_goes_changes_no_token(t_lm: Path, overlap: bool) -> None:
    plain, _ = made(t_lm, overlap=False, desk=False)
    engine, steps = made(t_lm, overlap, desk=True)
    wanted, found = outputs(plain, 1), outputs(engine, 1)
    both = wanted.keys() & found.keys()
    assert len(both) > 20
    for name in both:
        assert found[name].tokens == wanted[name].tokens, name
        assert found[name].finish == wanted[name].finish
    assert engine.stats().preemptions > 0
    assert {whole for _, whole, _ in steps[0]._recorded} == {True, False}


def test_samples_may_leave_as_one_after_any_sampling(t_lm: Path) -> None:
    """A backend may have ids and what is finite side by side in steps that are not replayed, too."""
    engine, _ = made(t_lm, overlap=True, desk=False)
    sample, as_one = engine.runner.backend.ops.sample, 0

    def side_by_side(logits: torch.Tensor, params: Sampling) -> Samples:
        nonlocal as_one
        samples = sample(logits, params)
        if params.logprobs is None:
            samples.together, as_one = torch.stack((samples.ids, samples.finite.long())), as_one + 1
        return samples

    vars(engine.runner.backend.ops)["sample"] = side_by_side
    plain, _ = made(t_lm, overlap=False, desk=False)
    wanted, found = outputs(plain, 5), outputs(engine, 5)
    assert as_one > 20
    for name in wanted.keys() & found.keys():
        assert found[name].tokens == wanted[name].tokens, name
        assert len(found[name].logprobs) == len(wanted[name].logprobs)


def test_steady_steps_send_new_blocks_alone(t_lm: Path) -> None:
    """The tables go over when a batch is laid; afterwards only blocks that are new."""
    engine, steps = made(t_lm, overlap=True, desk=True)
    laid: list[int] = []
    memory = engine.runner.backend.memory
    renew = memory.renew

    def counted(there: torch.Tensor, here: torch.Tensor) -> None:
        if there.dim() == 2:
            laid.append(len(there))
        renew(there, here)

    memory.renew = counted  # type: ignore[method-assign]
    for i in range(3):
        engine.add(request(str(i), [5 + i] * (3 + i), max_tokens=20))
    for _ in range(16):
        engine.step()
    assert laid == [3]
    for row, running in enumerate(engine.scheduler.running):
        used = (running.num_computed - 1) // LIMITS.block_size + 1
        assert used > 3
        assert steps[0].desk.tables[row, :used].tolist() == running.blocks[:used]


def test_what_is_laid_is_there_once_sent_and_rows_of_nobody_are_harmless() -> None:
    desk = Desk(HostMemory(CPU), LIMITS, torch.float64)
    slots = desk.lay("slots", np.arange(20, 26))
    desk.send()
    assert slots.tolist() == list(range(20, 26))
    fewer, lens = desk.lay("slots", [40]), desk.lay("lens", [9])
    assert slots.tolist() == list(range(20, 26)), "not before it is sent"
    with desk.cleared():
        assert desk.view("lens", 6).tolist() == [1] * 6
        assert max(desk.view("slots", 6).tolist()) < LIMITS.block_size
    assert slots.tolist() == list(range(20, 26))
    desk.send()
    assert (fewer.tolist(), lens.tolist()) == ([40], [9])
    assert max(desk.view("slots", 6).tolist()[1:]) < LIMITS.block_size
    assert sorted(desk.view("order", 6).tolist()) == list(range(6))


@pytest.mark.parametrize("typed", [True, False])
def test_small_tensors_travel_together(monkeypatch: pytest.MonkeyPatch, typed: bool) -> None:
    """Pinned memory without a device that could pin: what arrives is what was sent, aligned, in one transfer a type."""
    empty, buffers = torch.empty, []

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        assert pin_memory
        buffers.append(empty(*shape, **options))
        return buffers[-1]

    monkeypatch.setattr(torch, "empty", unpinned)
    memory = PinnedMemory(CPU)
    memory.typed = typed
    tables = torch.arange(40, dtype=torch.int32).view(5, 8)
    hosts = [torch.arange(7), torch.zeros(0, dtype=torch.int64), tables[:, :3], torch.rand(3), torch.arange(2) > 0]
    there = memory.upload_all(hosts)
    assert len(buffers) == (4 if typed else 1)
    for host, sent in zip(hosts, there, strict=True):
        assert torch.equal(host, sent)
        assert sent.dtype == host.dtype
        assert (sent.data_ptr() - buffers[0].data_ptr()) % 16 == 0 or typed
    hosts[0].fill_(0)
    assert there[0].tolist() == list(range(7))
