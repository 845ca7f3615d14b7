"""Real weights against ids that transformers generated in float32 (tests/data/golden), greedy, 48 tokens at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import engine, finish, request
from real_models import real_model

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "golden"), [("smollm2", "smollm2-135m-float32.json"), ("gemma3", "gemma3-270m-float32.json")]
)
def test_greedy_ids_equal_the_golden_ones(name: str, golden: str) -> None:
    outputs: list[dict[str, Any]] = json.loads((GOLDEN / golden).read_text())["outputs"]
    made = engine(real_model(name).gguf, max_model_len=1024, kv_cache_memory=256 * 2**20)
    for i, output in enumerate(outputs):
        made.add(request(str(i), output["prompt_ids"], max_tokens=48, ignore_eos=False))
    ours = finish(made)
    for i, output in enumerate(outputs):
        assert ours[str(i), 0].tokens == output["output_ids"]
