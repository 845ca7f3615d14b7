"""Tiny models of every architecture on the stand-in NPU, all tasks, against the CPU backend in float32.

The suite prints what each task called, so these tests carry the mark `task`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from engines import Output, engine, run
from rig.install import CALLS

from anycore.engine.engine import Engine

FUSED, VARLEN = "npu::npu_fused_infer_attention_score", "npu::npu_fusion_attention"
STORE = "npu::npu_scatter_pa_kv_cache"


def inputs(count: int, low: int, high: int, vocab: int = 170, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


def on_ascend(folder: Path, dtype: str = "float16", **settings: Any) -> Engine:
    return engine(folder, backend="ascend", dtype=dtype, overlap=True, **settings)


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [output.tokens for output in outputs]


FAMILIES = {
    "llama": {"family": "llama"},
    "llama-one-to-one": {"family": "llama", "kv_heads": 4},
    "mistral-window": {"family": "mistral", "window": 24},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3-128": {"family": "qwen3", "head_dim": 128},
    "qwen3-96": {"family": "qwen3", "head_dim": 96},
    "gemma3-window": {"family": "gemma3", "window": 24},
}


@pytest.mark.task("generate")
@pytest.mark.parametrize("name", FAMILIES)
def test_decoders_generate_what_the_cpu_generates(tmp_path: Path, name: str) -> None:
    folder = tiny.tiny_lm(tmp_path, **{"layers": 2, **FAMILIES[name]})
    prompts = inputs(4, 1, 60)
    before = CALLS[FUSED] + CALLS[f"{FUSED}.out"]
    found = run(on_ascend(folder), prompts, max_tokens=6)
    assert tokens_of(found) == tokens_of(run(engine(folder), prompts, max_tokens=6))
    assert CALLS[FUSED] + CALLS[f"{FUSED}.out"] > before, "attention went elsewhere"


@pytest.mark.task("embed")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "xlmr", "qwen3"])
def test_h08_embeddings_are_those_of_the_cpu(t_bert: Path, t_xlmr: Path, t_qemb: Path, kind: str, dtype: str) -> None:
    """vllm-ascend#1960, #4796, #3777: bge-like models start and give the right vectors."""
    folder = {"bert": t_bert, "xlmr": t_xlmr, "qwen3": t_qemb}[kind]
    texts = inputs(5, 1, 50)
    before = CALLS[VARLEN] + CALLS[FUSED]
    found = [output.vector for output in run(on_ascend(folder, dtype), texts)]
    exact = [output.vector for output in run(engine(folder), texts)]
    assert all(float(np.dot(a, b)) >= 0.999 for a, b in zip(found, exact, strict=True))
    assert CALLS[VARLEN] + CALLS[FUSED] > before or (kind, dtype) == ("qwen3", "float32")


@pytest.mark.task("rerank")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "xlmr", "qwen3"])
def test_h08_scores_are_those_of_the_cpu(t_ce: Path, t_ce_xlmr: Path, t_qrr: Path, kind: str, dtype: str) -> None:
    folder = {"bert": t_ce, "xlmr": t_ce_xlmr, "qwen3": t_qrr}[kind]
    pairs = inputs(5, 3, 50)
    found = [output.scores[0] for output in run(on_ascend(folder, dtype), pairs)]
    exact = [output.scores[0] for output in run(engine(folder), pairs)]
    allowed = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[dtype]
    assert np.abs(np.subtract(found, exact)).max() <= allowed


def test_float32_decoders_are_right_and_say_that_they_are_slow(t_lm: Path) -> None:
    made = on_ascend(t_lm, "float32")
    prompts = inputs(3, 1, 60)
    before = CALLS[FUSED]
    assert tokens_of(run(made, prompts)) == tokens_of(run(engine(t_lm), prompts))
    assert CALLS[FUSED] == before
    assert any("float32" in name and count for name, count in made.runner.backend.fallbacks.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 160, "max_num_seqs": 3},
        {"kv_cache_memory": 6 * 64 * 1024, "max_model_len": 200, "enable_prefix_caching": False},
    ],
    ids=["chunked", "tight", "preempted"],
)
def test_s01_m07_company_chunks_and_preemption_change_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tiny.tiny_lm(tmp_path, layers=1)
    prompts = inputs(5, 90, 140)
    made = on_ascend(folder, **settings)
    found = run(made, prompts, max_tokens=30)
    if "max_model_len" in settings:
        assert made.stats().preemptions > 0, "nobody was preempted"
    assert tokens_of(found) == tokens_of(run(engine(folder), prompts, max_tokens=30))


def test_m04_a_cached_prefix_changes_nothing(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, layers=1)
    made = on_ascend(folder)
    prompt = inputs(1, 300, 300)[0]
    first, again = (run(made, [prompt])[0] for _ in range(2))
    assert (first.cached, again.cached) == (0, 256)
    assert first.tokens == again.tokens == run(engine(folder), [prompt])[0].tokens


def test_m05_vllm_ascend_7145_cached_prefixes_count_in_vectors_and_scores(t_qemb: Path, t_qrr: Path) -> None:
    """Pooling went past the cache there: a repeated text lost its first blocks."""
    text = inputs(1, 300, 300)[0]
    for folder, read in ((t_qemb, lambda output: output.vector), (t_qrr, lambda output: output.scores)):
        made = on_ascend(folder, max_num_batched_tokens=160, max_num_seqs=8)
        outputs = [run(made, [text])[0] for _ in range(3)]
        assert [output.cached for output in outputs] == [0, 256, 256]
        whole = read(run(on_ascend(folder, enable_prefix_caching=False), [text])[0])
        assert all(np.abs(np.subtract(read(output), whole)).max() <= 4e-3 for output in outputs)


def test_sglang_11696_later_tokens_reach_an_encoders_first_row(t_xlmr: Path) -> None:
    """A backend that ignores `causal` gives bge-m3 the same vector for different texts."""
    made = on_ascend(t_xlmr, "float32")
    text = inputs(1, 30, 30)[0]
    other = text[:10] + text[:9:-1]
    first, second = (output.vector for output in run(made, [text, other]))
    assert float(np.dot(first, second)) < 0.9999


def test_replayed_decoding_equals_eager_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager because the device has no streams left for graphs, which is said."""
    folder = tiny.tiny_lm(tmp_path, layers=2)
    prompts = inputs(5, 100, 140)  # requests reach a second block while they decode
    before = CALLS[f"{FUSED}.out"]
    replayed = run(on_ascend(folder, max_num_seqs=8), prompts, max_tokens=40)
    assert CALLS[f"{FUSED}.out"] > before, "nothing was captured"
    monkeypatch.setenv("STANDIN_NO_GRAPHS", "1")
    before = CALLS[f"{FUSED}.out"]
    eager = run(on_ascend(folder, max_num_seqs=8), prompts, max_tokens=40)
    assert CALLS[f"{FUSED}.out"] == before
    assert "207008" in caplog.text
    assert tokens_of(replayed) == tokens_of(eager)
