"""`--kv-cache-dtype`: what plan, check, dry run and a running engine make of it, and who refuses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny

from anycore import plugins
from anycore.answers import Question, read
from anycore.ask import check
from anycore.cli.main import main
from anycore.config import ModelConfig
from anycore.contract.declare import Device, Probe
from anycore.engine.launch import prepare
from anycore.errors import ConfigError, Unsupported
from anycore.plugins import Plugins

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPTS = [list(range(4, 44)), [9] * 17, [7, 8, 9]]


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return tiny.tiny_lm(folder, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--format", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def on(backend: str, chip: str) -> Plugins:
    """The backends as a machine finds them where one device of this chip is all there is."""
    loaded = plugins.load()
    spec = loaded.backend(backend)
    here = replace(spec, probe=lambda: Probe(devices=(Device(0, f"a {chip}", chip, 40 << 30),)))
    return replace(loaded, backends=(here,))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_token_takes_a_byte_a_number_and_a_scale_a_head(
    llama: str, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    words = (llama, "--device", "h100", "--max-num-seqs", "512")
    whole, rounded = planned(capsys, *words), planned(capsys, *words, "--kv-cache-dtype", kind)
    assert whole["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert rounded["bytes_per_token"] == 2 * 32 * 8 * (128 + 2)
    assert (whole["kv_cache_dtype"], rounded["kv_cache_dtype"]) == ("bfloat16", kind)
    assert eval(rounded["formulas"]["kv_cache"]) == rounded["terms"]["kv_cache"]
    assert rounded["limits"]["blocks"] > 1.9 * whole["limits"]["blocks"]


def test_a_rounded_cache_is_advised_where_another_does_not_fit(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, llama, "--device", "4090", "--concurrency", "6", "--context", "8192")
    assert not found["fits"]
    advised = [one["text"] for one in found["advice"]]
    assert {"--kv-cache-dtype int8", "--kv-cache-dtype fp8"} <= set(advised)
    assert planned(
        capsys, llama, "--device", "4090", "--concurrency", "6", "--context", "8192", "--kv-cache-dtype", "int8"
    )["fits"]


def test_who_does_not_declare_it_refuses_before_loading_and_names_what_would_do(llama: str) -> None:
    config = ModelConfig(model=llama, backend="ascend", kv_cache_dtype="int8")
    with pytest.raises(Unsupported, match="a KV cache in int8 is not declared") as refused:
        prepare(config, on("ascend", "910B"))
    assert "Would do instead: --kv-cache-dtype auto" in refused.value.message
    old = replace(config, backend="cuda", kv_cache_dtype="fp8")
    with pytest.raises(Unsupported, match="a KV cache in fp8 is not among int8") as refused:
        prepare(old, on("cuda", "sm80"))
    assert "Would do instead: --kv-cache-dtype int8, --kv-cache-dtype auto" in refused.value.message
    assert prepare(old, on("cuda", "sm90")).choice.support.level.value == "native"


def test_check_ranks_what_is_nearest(llama: str) -> None:
    loaded = plugins.load()
    question = Question(llama, backend="cuda", chip="sm80", kv_cache_dtype="fp8")
    (found,) = check(question, loaded, read(question, loaded)).answers
    assert not found.supported
    assert found.alternatives[0].changes == ("--kv-cache-dtype int8",)
    assert found.alternatives[1].changes == ("--kv-cache-dtype auto",)


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_both_spellings_are_the_same_cache(llama: str, asked: str) -> None:
    prepared = prepare(ModelConfig(model=llama, backend="cuda", kv_cache_dtype=asked), on("cuda", "sm90"))
    decided = {decision.name: decision for decision in prepared.decisions}["kv_cache_dtype"]
    assert (decided.value, decided.by, decided.adjusted) == ("fp8", "flag", False)
    assert prepared.card()["kv_cache_dtype"] == "fp8"


def test_a_model_without_a_cache_says_that_it_has_no_effect(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path)
    config = ModelConfig(model=str(folder), backend="cpu", kv_cache_dtype="int8")
    (said,) = prepare(config, plugins.load()).adjustments
    assert "keeps no KV cache: --kv-cache-dtype int8 has no effect" in said
    with pytest.raises(ConfigError, match="--strict refuses"):
        prepare(config, plugins.load(), strict=True)


def test_another_word_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be one of auto, fp8, int8, fp8_e4m3, not 'int4'"):
        ModelConfig(model="m", kv_cache_dtype="int4")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_tokens_are_the_same_whole_in_chunks_cached_and_preempted(small: Path, kind: str) -> None:
    """Rounding a token hangs on itself alone, so nothing the scheduler does can show."""
    roomy = engines.engine(small, kv_cache_dtype=kind, max_model_len=128)
    alone = [engines.run(roomy, [prompt], max_tokens=12)[0].tokens for prompt in PROMPTS]
    again = engines.run(roomy, PROMPTS, max_tokens=12)
    assert [output.tokens for output in again] == alone
    assert again[0].cached >= 32
    chunked = engines.engine(small, kv_cache_dtype=kind, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=4)
    assert [output.tokens for output in engines.run(chunked, PROMPTS, max_tokens=12)] == alone
    short = [[20 + i] * 14 for i in range(4)]
    right = [engines.run(roomy, [prompt], max_tokens=30)[0].tokens for prompt in short]
    token = roomy.card["memory"]["kv_bytes_per_token"]
    tight = engines.engine(
        small, kv_cache_dtype=kind, max_model_len=64, kv_cache_memory=8 * 16 * token, max_num_seqs=4,
        max_num_batched_tokens=64, enable_prefix_caching=False,
    )  # fmt: skip
    assert [output.tokens for output in engines.run(tight, short, max_tokens=30)] == right
    assert tight.scheduler.preemptions > 0
