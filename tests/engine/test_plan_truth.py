"""The memory plan against what is allocated: weights and cache exact, decoders within 3 % in all, never too little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from allocations import allocations
from engine.worst import fill
from real_models import PACKAGES

from anycore import plugins
from anycore.config import ModelConfig
from anycore.engine.engine import Engine
from anycore.engine.launch import build, prepare

TOLERANCE = 0.03


def of_threads(engine: Engine) -> int:
    """Bytes that the kernels' threads keep for groups of texts, of which torch knows nothing."""
    step: Any = engine.runner._step
    return sum(step.kernels.threads * script.fixed["room"] for script in step._scripts.values() if script is not None)


def compare(model: Path | str, **settings: Any) -> float:
    """Run the worst and return measured / planned in all, the margin left out."""
    engine = build(prepare(ModelConfig(model=str(model), backend="cpu", **settings), plugins.load()))
    planned, measured = engine.card["memory"], engine.card["memory_measured"]
    assert measured["weights"] == pytest.approx(planned["weights"], rel=0.001, abs=4096)
    if planned["kv_cache"]:
        assert measured["kv_cache"] == planned["kv_cache"]
    with allocations() as found:
        fill(engine)
    all_planned = planned["used"] - planned["margin"]
    all_measured = planned["weights"] + planned["kv_cache"] + found.peak + of_threads(engine)
    return float(all_measured / all_planned)


DECODER = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_cache_memory": 16 << 20}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_decoders(tmp_path: Path, family: str, dtype: str) -> None:
    folder = tiny.tiny_lm(tmp_path, family=family, max_positions=2048)
    assert 1 - TOLERANCE < compare(folder, dtype=dtype, **DECODER) <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bounds_are_looser_where_tiny_models_make_masks_and_padding_large(
    tmp_path: Path, t_bert: Path, dtype: str
) -> None:
    windowed = tiny.tiny_lm(tmp_path, family="gemma3", max_positions=2048, window=256)
    assert 0.8 < compare(windowed, dtype=dtype, **DECODER) <= 1
    # Planned for are single texts and steps of all rows at once, too; this load's texts go in groups.
    assert 0.5 < compare(t_bert, dtype=dtype, max_num_batched_tokens=512) <= 1


SMALL = {"max_model_len": 384, "max_num_seqs": 3, "max_num_batched_tokens": 128, "kv_cache_memory": 384 << 20}


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "settings", "least"),
    [
        ("smollm2", {"dtype": "float32", **SMALL}, 1 - TOLERANCE),
        ("smollm2", {"dtype": "bfloat16", **SMALL}, 1 - TOLERANCE),
        ("minilm", {"max_num_batched_tokens": 2048, "max_num_seqs": 8}, 0.6),  # see above
    ],
)
def test_real_models(name: str, settings: dict[str, Any], least: float) -> None:
    assert least < compare(PACKAGES[name], **settings) <= 1
