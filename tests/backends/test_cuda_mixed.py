"""Steps with prompts that are replayed, on the CUDA backend's kernels in Triton's interpreter."""

from __future__ import annotations

import math
from pathlib import Path

import engines
import pytest
import tiny
import torch
from backends.cuda_interpreted import interpreted
from backends.test_cuda_engine import PROMPTS, engine
from torch import Tensor

from anycore.contract import mixed
from anycore.contract.batch import Batch
from anycore.contract.costs import mixed_rows
from anycore.contract.mixed import MixedSteps
from anycore_cuda.plan import Plan, RoomyPlan


def test_prompts_beside_others_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "WORTH", math.inf)  # in the interpreter launching is computing
    monkeypatch.setattr(mixed, "MIXED_PROMPTS", 3)
    run = MixedSteps.__call__

    def captured_at_once(steps: MixedSteps, batch: Batch) -> Tensor | None:
        kind = steps.kind_of(batch)
        if kind is not None and kind not in steps._recorded:
            steps._record(batch, kind)
        return run(steps, batch)

    monkeypatch.setattr(MixedSteps, "__call__", captured_at_once)
    folder = tiny.tiny_lm(tmp_path, family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32)
    mine, steps = engine(folder, "int8")
    steps[0].compiles = False  # and its warm-up is long here
    steps[0].mixed.rows = mixed_rows(mine.limits.max_num_batched_tokens)
    wanted = engines.run(engines.engine(folder, kv_cache_dtype="int8"), PROMPTS[:2], max_tokens=2)
    found = engines.run(mine, PROMPTS[:2], max_tokens=2)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    recorded = steps[0].mixed._recorded
    assert recorded
    assert None not in recorded.values()


def batch_of(rows: int, lens: list[int], contexts: list[int]) -> Batch:
    zeros = torch.zeros(rows, dtype=torch.int64)
    return Batch(zeros, zeros, lens, contexts, None, True, zeros, torch.zeros(len(lens), 4, dtype=torch.int32), [None])


def test_tiles_and_requests_that_are_left_over_are_nobodys() -> None:
    """Nobody has the last place, and no rows there: a tile that began behind row 0 would read blocks before it."""
    memory = interpreted().memory
    plan = RoomyPlan(batch_of(64, [0] * 300, [0] * 300), 256, 16, memory, 1)
    for lens, contexts in (([1, 40, 1, 1], [9, 0, 30, 8]), ([1, 1, 5], [4, 6, 2])):
        batch = batch_of(sum(lens), lens, contexts)
        batch.plan = Plan(batch, memory, 1)
        plan.renew(batch)
        tiles = plan.tiles(16).tolist()
        prompt = lens.index(max(lens))
        count = -(-lens[prompt] // 16)
        assert sorted(tiles[:count]) == [[prompt, 16 * i] for i in range(count)]
        assert tiles[count:] == [[299, 0]] * (4 + 16 - count)
        decoding = plan.decoding.tolist() if plan.decoding is not None else []
        singles = lens.count(1)
        assert sorted(decoding[:singles]) == [i for i, rows in enumerate(lens) if rows == 1]
        assert decoding[singles:] == [299] * (256 - singles)
