"""`anycore serve --dry-run`: each effective value, who decided it, and what was adjusted; nothing is started."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny

from anycore.cli.main import main
from anycore.config import ModelConfig, ServerConfig
from anycore.server.port import listen

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 4096, "vocab_size": 448, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A model without weights: a dry run that looked for them would fail."""
    tiny.save_bpe(tmp_path, 448, prefix=[], chat_template=tiny.CHAT_TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def effective(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["serve", "--port", "0", *words, "--dry-run", "--json"]) == 0
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
    assert main(["serve", llama, "--port", "0", *TIGHT, "--dry-run"]) == 0
    assert f"adjusted:\n    - {line}" in capsys.readouterr().out
    assert main(["serve", llama, "--port", "0", *TIGHT, "--dry-run", "--strict"]) == 2
    assert line in capsys.readouterr().err


def test_secrets_do_not_show(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", llama, "--port", "0", "--api-key", "sk-marker", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "api_key = *** (flag)" in text
    assert "marker" not in text


def test_what_cannot_be_served_is_refused_as_serve_does(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", llama, "--port", "0", "--dtype", "float16", "--backend", "cpu", "--dry-run"]) == 3
    assert "no support for generate with LlamaForCausalLM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--override-generation-config", '{"temprature": 1}'], "unknown key 'temprature'; did you mean temperature?"),
        (["--override-generation-config", "{"], "--override-generation-config is not valid JSON"),
        (["--override-generation-config", '{"top_k": 1.5}'], "top_k must be an integer, not 1.5"),
        (["--chat-template", "FOLDER/none.jinja"], "--chat-template must name a file with a Jinja template"),
        (["--chat-template", "FOLDER/broken.jinja"], "the chat template cannot be rendered"),
        (["--tool-parser", "none-such"], "--tool-parser must be one of auto, none, "),
        (["--reasoning-parser", "none-such"], "--reasoning-parser must be one of auto, none, "),
        (["--run-tools", "none-such"], "--run-tools none-such: no plugin brings a tool of this name"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key-file", "FOLDER/none"], "--api-key-file"),
        (["--ssl-certfile", "FOLDER/none.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "FOLDER/broken.jinja"], "--ssl-certfile"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
        (["--otlp-traces-endpoint", "collector:4318"], "--otlp-traces-endpoint must be a URL"),
        (["--api-servers", "2", "--keep-alive", "5"], "--keep-alive works where one front serves"),
        (["--served-model-name", "a", "b", "a"], "the name 'a' is used twice"),
    ],
)
def test_s09_o08_o15_what_serve_would_refuse_is_refused(
    words: list[str], said: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(llama) / "broken.jinja").write_text("{% for")
    given = [word.replace("FOLDER", llama) for word in words]
    assert main(["serve", llama, "--port", "0", *given, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_o08_a_port_in_use_is_told_when_all_else_is_in_order(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", llama, "--port", port, "--dry-run"]) == 2
        assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
        assert main(["serve", llama, "--port", port, "--tool-parser", "none-such", "--dry-run"]) == 2
        assert "--tool-parser" in capsys.readouterr().err


def test_a_model_among_several_is_checked_as_a_single_one(
    tmp_path: Path, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    for entry, said in (
        ("override_generation_config: '{\"top_p\": 7}'", "top_p must be between 0 and 1"),
        ("chat_template: /none.jinja", "'/none.jinja' cannot be read"),
        ("served_model_name: [first]", "the name 'first' is used twice"),
    ):
        rest = "" if "served" in entry else "    served_model_name: [second]\n"
        models = f"  - model: {llama}\n    served_model_name: [first]\n  - model: {llama}\n    {entry}\n{rest}"
        file.write_text(f"port: 0\nseed: 3\nmodels:\n{models}")
        assert main(["serve", "--config", str(file), "--dry-run"]) == 2
        assert said in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(llama).glob("tokenizer*"):
        path.unlink()
    assert main(["serve", llama, "--port", "0", "--dry-run"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
