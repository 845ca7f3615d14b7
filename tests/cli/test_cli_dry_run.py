"""`anycore serve --dry-run`: each effective value, who decided it, and what was adjusted; nothing is started."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from anycore.cli.main import main
from anycore.config import ModelConfig, ServerConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 4096, "vocab_size": 99, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A model without weights: a dry run that looked for them would fail."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def effective(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["serve", *words, "--dry-run", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def by(entries: list[dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry["by"] for entry in entries}


def test_every_value_has_its_author(tmp_path: Path, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"models:\n  - model: {llama}\n    max_num_seqs: 4\n    seed: 7\nport: 9000\nhost: 0.0.0.0\n")
    report = effective(capsys, "--config", str(file), "--port", "9001", "--backend", "cpu", "--seed", "8")
    server = by(report["server"])
    assert (server["port"], server["host"], server["api_servers"]) == ("flag", "file", "default")
    (model,) = report["models"]
    found = by(model["settings"])
    assert found["backend"] == found["seed"] == "flag"
    assert found["max_num_seqs"] == found["model"] == "file"
    assert found["task"] == found["dtype"] == found["max_model_len"] == "model"
    assert found["block_size"] == found["memory_utilization"] == "backend"
    assert found["kv_blocks"] == found["kv_cache_memory"] == "plan"
    assert found["max_queued"] == "default"
    values = {entry["name"]: entry["value"] for entry in model["settings"]}
    assert (values["seed"], values["max_num_seqs"], values["max_model_len"]) == (8, 4, 4096)


def test_nothing_that_has_a_value_is_left_out(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = effective(capsys, llama)
    defaults = {item.name for item in fields(ModelConfig) if item.default not in (None, ())}
    names = [entry["name"] for entry in report["models"][0]["settings"]]
    assert defaults <= set(names)
    assert len(set(names)) == len(names)
    assert {entry["name"] for entry in report["server"]} >= {
        item.name for item in fields(ServerConfig) if item.default not in (None, ())
    }


TIGHT = ["--kv-cache-memory", "1MiB", "--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--backend", "cpu"]


def test_an_adjustment_is_told_with_its_reason_and_refused_by_strict(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (model,) = effective(capsys, llama, *TIGHT)["models"]
    (line,) = model["adjusted"]
    assert line.startswith("max_model_len = ")
    assert "the model's own is 4096" in line
    assert main(["serve", llama, *TIGHT, "--dry-run"]) == 0
    assert f"adjusted:\n    - {line}" in capsys.readouterr().out
    assert main(["serve", llama, *TIGHT, "--dry-run", "--strict"]) == 2
    assert line in capsys.readouterr().err


def test_secrets_do_not_show(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", llama, "--api-key", "sk-marker", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "api_key = *** (flag)" in text
    assert "marker" not in text


def test_what_cannot_be_served_is_refused_as_serve_does(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", llama, "--dtype", "float16", "--backend", "cpu", "--dry-run"]) == 3
    assert "no support for generate with LlamaForCausalLM" in capsys.readouterr().err
