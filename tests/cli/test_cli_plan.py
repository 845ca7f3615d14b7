"""`anycore plan`: its numbers are those of a start, what it advises fits, and it needs neither weights nor torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from engines import engine

from anycore.cli.main import main

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
BGE_M3 = {
    "architectures": ["XLMRobertaModel"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 250002, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5,
    "hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("llama-8b"), LLAMA_8B)


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("bge-m3"), BGE_M3)


def folder_of(folder: Path, config: dict[str, Any]) -> str:
    """A model folder without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_terms_are_what_their_formulas_say(capsys: pytest.CaptureFixture[str], llama: str, bge: str) -> None:
    for model, device in ((llama, "h100"), (llama, "910b"), (bge, "l40s")):
        code, found = plan(capsys, model, "--device", device)
        assert code == 0
        for term in ("weights", "kv_cache", "activations", "logits"):
            if found["terms"][term]:
                assert eval(found["formulas"][term], {"max": max, "min": min}) == found["terms"][term], term
        assert sum(found["terms"].values()) == found["used"] <= found["budget"]
        assert set(found["formulas"]) == {term for term, number in found["terms"].items() if number}


def test_m01_bytes_a_token(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    _, found = plan(capsys, llama, "--device", "h200", "--context", "40960")
    assert found["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert found["bytes_per_sequence"] == 40960 * found["bytes_per_token"]


def test_the_plan_is_what_an_engine_then_has(capsys: pytest.CaptureFixture[str], t_lm: Path, t_bert: Path) -> None:
    for folder, words in ((t_lm, ["--kv-cache-memory", "8MiB"]), (t_bert, ["--max-num-seqs", "4"])):
        code, found = plan(capsys, str(folder), "--backend", "cpu", "--dtype", "float32", *words)
        assert code == 0
        given = {"kv_cache_memory": 8 << 20} if folder == t_lm else {"max_num_seqs": 4, "kv_cache_memory": None}
        card = engine(folder, **given).card
        assert {term: card["memory"][term] for term in found["terms"]} == found["terms"]
        assert card["max_model_len"] == found["limits"]["max_model_len"]


def test_what_does_not_fit_exits_with_3_and_all_advice_fits(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    words = [llama, "--device", "4090", "--concurrency", "16", "--context", "8k"]
    code, found = plan(capsys, *words)
    assert code == 3
    assert not found["fits"]
    assert "16 sequences of 8000 tokens need 15.62" in found["reason"]
    assert len(found["advice"]) >= 3
    for one in found["advice"]:
        name, value = shlex.split(one["text"])
        changed = [*words, name, value]
        if name in words:
            changed = words.copy()
            changed[words.index(name) + 1] = value
        code, again = plan(capsys, *changed)
        assert code == 0, one
        assert again["used"] == one["used"]


@pytest.mark.parametrize(
    "words",
    [
        ["--device", "cpu", "--device-memory", "8GiB"],
        ["--device", "4090", "--memory-utilization", "0.5"],
        ["--device", "4090", "--kv-cache-memory", "40GiB"],
        ["--device", "h200", "--kv-cache-memory", "1000"],
        ["--device", "h200", "--kv-cache-memory", "1GiB", "--concurrency", "4", "--context", "8192"],
        ["--device", "4090", "--max-num-batched-tokens", "131072"],
    ],
)
def test_other_reasons_not_to_fit(capsys: pytest.CaptureFixture[str], llama: str, words: list[str]) -> None:
    code, found = plan(capsys, llama, *words)
    assert code == 3
    assert "GiB" in found["reason"]
    assert found["advice"]


def test_three_settings_fit_as_they_are_printed(capsys: pytest.CaptureFixture[str], llama: str, bge: str) -> None:
    for model in (llama, bge):
        _, found = plan(capsys, model, "--device", "l40s")
        assert list(found["settings"]) == ["latency", "balanced", "throughput"]
        steps = [one["max_num_batched_tokens"] for one in found["settings"].values()]
        assert steps == sorted(set(steps))
        for one in found["settings"].values():
            code, again = plan(capsys, model, "--device", "l40s", *one["flags"].split())
            assert code == 0
            assert again["used"] == one["used"]


def test_throughput_leaves_the_cache_its_room(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    _, found = plan(capsys, llama, "--device", "4090", "--context", "8192")
    one = found["settings"]["throughput"]
    assert one["cache_tokens"] * found["bytes_per_token"] > (one["used"] - found["terms"]["weights"]) // 2 - (1 << 22)


def test_most_at_once_is_the_most(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    words = [llama, "--device", "4090", "--context", "8192"]
    _, found = plan(capsys, *words)
    most = found["most_sequences_at_once"]
    assert most > 1
    assert plan(capsys, *words, "--concurrency", str(most))[0] == 0
    assert plan(capsys, *words, "--concurrency", str(most + 1))[0] == 3


def test_knobs_are_differences_of_plans(capsys: pytest.CaptureFixture[str], llama: str) -> None:
    words = [llama, "--device", "h200", "--context", "4096", "--max-num-seqs", "32"]
    _, found = plan(capsys, *words, "--max-num-batched-tokens", "4096")
    _, more = plan(capsys, *words, "--max-num-batched-tokens", "5120")
    assert more["used"] - found["used"] == found["knobs"]["1024 more batched tokens"]["bytes"]
    words[-1] = "33"
    _, more = plan(capsys, *words, "--max-num-batched-tokens", "4096")
    assert more["used"] - found["used"] == found["knobs"]["one more sequence, with 4096 tokens"]["bytes"]


def test_encoders_have_no_cache(capsys: pytest.CaptureFixture[str], bge: str) -> None:
    code, found = plan(capsys, bge, "--device", "910b", "--task", "embed")
    assert code == 0
    assert found["terms"]["kv_cache"] == found["terms"]["logits"] == found["bytes_per_token"] == 0
    assert found["most_sequences_at_once"] is None
    assert found["limits"]["max_num_batched_tokens"] >= found["limits"]["max_model_len"] == 8192
    assert main(["plan", bge, "--device", "910b"]) == 0
    assert "no cache: inputs of up to 8192 tokens" in capsys.readouterr().out


def test_several_models_share_a_device(capsys: pytest.CaptureFixture[str], llama: str, bge: str) -> None:
    code, found = plan(capsys, llama, bge, "--device", "a100-80gb")
    assert code == 0
    shares = [one["limits"]["memory_utilization"] for one in found["models"]]
    assert sum(shares) <= 0.9
    assert sum(one["used"] for one in found["models"]) <= 0.9 * found["models"][0]["device"]["memory"]
    assert found["models"][0]["cache_tokens"] > 131072
    assert main(["plan", llama, llama, bge, "--device", "4090"]) == 3
    assert "together these models need" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "fits", "not_"), [("kv-cache-memory", "40GiB", "60GiB"), ("memory-utilization", "0.48", "0.6")]
)
def test_what_each_model_is_given_is_held_against_the_device(
    capsys: pytest.CaptureFixture[str], llama: str, flag: str, fits: str, not_: str
) -> None:
    """It was planned for one model at a time, and a share given up for one of our own."""
    code, found = plan(capsys, llama, llama, "--device", "h200", f"--{flag}", fits)
    assert code == 0
    assert sum(one["used"] for one in found["models"]) <= found["models"][0]["device"]["memory"]
    if flag == "memory-utilization":
        assert [one["limits"]["memory_utilization"] for one in found["models"]] == [0.48, 0.48]
    code, found = plan(capsys, llama, llama, "--device", "h200", f"--{flag}", not_)
    assert code == 3
    assert "together these models need" in found["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "a100"], "may be one of: A100-80GB, A100-40GB"),
        (["--device", "b9000"], "is not known; known are"),
        (["--device-memory", "80GiB"], "give --device or --backend"),
        (["--device", "h200", "--device-memory", "0"], "at least 1 byte"),
        (["--device", "h200", "--context", "8k", "--max-model-len", "4k"], "the same setting"),
        (["--device", "h200", "--concurrency", "0"], "at least 1"),
        (["--device", "h200", "--context", "200k"], "131072 positions"),
    ],
)
def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str], llama: str, words: list[str], said: str) -> None:
    assert main(["plan", llama, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_here_and_not_named_exits_with_3(llama: str, tmp_path: Path) -> None:
    assert main(["plan", str(tmp_path / "none")]) == 2
    assert main(["plan", llama, "--backend", "nobody"]) == 3
