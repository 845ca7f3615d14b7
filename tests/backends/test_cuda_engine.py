"""A whole engine on the CUDA backend's kernels in Triton's interpreter: overlapped steps, replayed decoding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import engines
import tiny
from backends.cuda_interpreted import interpreted

from anycore.contract.backend import StepOutput
from anycore.contract.capture import Replay
from anycore.contract.check_graphs import check_optimized
from anycore.contract.checks import AttentionCase
from anycore.contract.declare import Task
from anycore.contract.graphs import GraphStep, buckets
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.engine import Engine
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.models import loader
from anycore.models.source import Source
from anycore.models.spec import read_spec

LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=24, max_model_len=64, block_size=16, blocks=12)
PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 50)), [5] * 17]


def capture(work: Any) -> tuple[Replay, StepOutput]:
    """A graph's stand-in: the recorded work runs again and leaves its results where they were at first."""
    kept = work()

    def replay(batch: Any) -> None:
        again = work()
        kept.rows.copy_(again.rows)
        if kept.samples is not None:
            kept.samples.ids.copy_(again.samples.ids)
            kept.samples.finite.copy_(again.samples.finite)
            kept.samples.together.copy_(again.samples.together)

    return replay, kept


def engine(folder: Path, rounded: str | None = None) -> tuple[Engine, list[GraphStep]]:
    source = Source(str(folder), folder)
    spec = read_spec(source).for_task(Task.GENERATE)
    backend = interpreted()
    backend.overlap = True
    steps: list[GraphStep] = []

    def optimize(step: Any, limits: Limits) -> GraphStep:
        steps.append(GraphStep(step, backend.ops, limits, backend.device, capture))
        steps[0].mixed.rows = []  # test_cuda_mixed has these
        return steps[0]

    backend.optimize = optimize  # type: ignore[method-assign]
    model = loader.load(source, spec, backend, "float32")
    kv = backend.memory.allocate_kv(spec.kv(LIMITS.block_size, "float32", rounded), LIMITS.blocks)
    runner = Runner(model, backend, Task.GENERATE, LIMITS, kv)
    return Engine(runner, Scheduler(LIMITS, BlockPool(LIMITS.blocks, LIMITS.block_size)), LIMITS), steps


def test_engine_on_the_kernels_equals_the_cpu_backend(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32)
    mine, steps = engine(folder)
    found = engines.run(mine, PROMPTS, max_tokens=4)
    wanted = engines.run(engines.engine(folder), PROMPTS, max_tokens=4)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    assert {size for size, _, _ in steps[0]._recorded} == set(buckets(LIMITS.max_num_seqs)), "no step was replayed"


def test_steps_on_a_rounded_cache_are_replayed(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32)
    mine, steps = engine(folder, "int8")
    found = engines.run(mine, PROMPTS[:1], max_tokens=3)
    wanted = engines.run(engines.engine(folder, kv_cache_dtype="int8"), PROMPTS[:1], max_tokens=3)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    assert None not in steps[0]._recorded.values()
    assert {size for size, _, _ in steps[0]._recorded} == set(buckets(LIMITS.max_num_seqs)), "no step was replayed"


def test_replayed_steps_of_every_kind_equal_the_step_itself() -> None:
    backend, steps = interpreted(), []

    def optimize(step: Any, limits: Limits) -> GraphStep:
        steps.append(GraphStep(step, backend.ops, limits, backend.device, capture))
        steps[0].mixed.rows = []
        return steps[0]

    backend.optimize = optimize  # type: ignore[method-assign]
    case = AttentionCase("float32", 16, causal=True, block_size=16, heads=4, kv_heads=2)
    check_optimized(backend, case)
    assert None not in steps[0]._recorded.values()
    assert {whole for _, whole, _ in steps[0]._recorded} == {True, False}


def test_buckets_reach_every_batch_size() -> None:
    for most in (1, 2, 3, 8, 100, 256, 300, 1000):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert all(after <= before + max(8, before // 4) for before, after in pairwise(sizes))
