"""Steps with prompts that are replayed, on the CUDA backend's kernels in Triton's interpreter."""

from __future__ import annotations

import math
from pathlib import Path

import engines
import pytest
import tiny
from backends.test_cuda_engine import PROMPTS, engine

from anycore.contract import mixed
from anycore.contract.costs import mixed_rows


def test_prompts_beside_others_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "WORTH", math.inf)  # in the interpreter launching is computing
    monkeypatch.setattr(mixed, "VISITS", 1)
    monkeypatch.setattr(mixed, "MIXED_PROMPTS", 3)
    folder = tiny.tiny_lm(tmp_path, family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32)
    mine, steps = engine(folder, "int8")
    steps[0].compiles = False
    steps[0].mixed.rows = mixed_rows(mine.limits.max_num_batched_tokens)
    wanted = engines.run(engines.engine(folder, kv_cache_dtype="int8"), PROMPTS[:2], max_tokens=2)
    found = engines.run(mine, PROMPTS[:2], max_tokens=2)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    recorded = steps[0].mixed._recorded
    assert recorded
    assert None not in recorded.values()
