"""YAML settings: keys are fields or flags, the command line wins, and what is wrong is named with file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from anycore.cli.main import main, parser_of
from anycore.cli.settings import Settings, gather
from anycore.config import ModelConfig, ServerConfig, shown
from anycore.errors import ConfigError
from anycore.models.catalog import DEMO


def settings(tmp_path: Path, text: str, *words: str) -> Settings:
    file = tmp_path / "serve.yaml"
    file.write_text(text, encoding="utf-8")
    return gather(parser_of("serve").read([*words, "--config", str(file)]))


def test_keys_are_fields_or_flags_or_aliases(tmp_path: Path) -> None:
    text = """
model: m
max_num_seqs: 8
max-num-batched-tokens: 1024
gpu-memory-utilization: 0.5
kv_cache_memory_bytes: 1GiB
prefix-caching: false
served-model-name: [a, b]
override_generation_config: {temperature: 0.5}
port: 9000
api-key: secret
"""
    found = settings(tmp_path, text)
    assert found.server == ServerConfig(port=9000, api_key=("secret",))
    assert found.models == (
        ModelConfig(
            model="m",
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            memory_utilization=0.5,
            kv_cache_memory=2**30,
            enable_prefix_caching=False,
            served_model_name=("a", "b"),
            override_generation_config='{"temperature": 0.5}',
        ),
    )


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    text = "model: m\nport: 9000\nmax_num_seqs: 8\nenable_prefix_caching: false\n"
    found = settings(tmp_path, text, "other", "--port", "9001", "--max-num-seqs", "4", "--enable-prefix-caching")
    assert found.server.port == 9001
    assert found.models == (ModelConfig(model="other", max_num_seqs=4),)


def test_several_models_have_their_own_keys_and_common_defaults(tmp_path: Path) -> None:
    text = """
max_num_seqs: 8
dtype: float32
models:
  - model: a
    task: generate
  - model: b
    task: embed
    backend: cpu
    max-num-seqs: 2
"""
    found = settings(tmp_path, text)
    assert found.models == (
        ModelConfig(model="a", task="generate", max_num_seqs=8, dtype="float32"),
        ModelConfig(model="b", task="embed", backend="cpu", max_num_seqs=2, dtype="float32"),
    )
    assert [model.max_num_seqs for model in settings(tmp_path, text, "--max-num-seqs", "3").models] == [3, 3]


def test_demo_is_the_built_in_list_and_flags_apply_to_each(tmp_path: Path) -> None:
    assert gather(parser_of("serve").read(["demo"])).models == DEMO
    found = gather(parser_of("serve").read(["demo", "--threads", "1"]))
    assert [model.threads for model in found.models] == [1] * len(DEMO)
    assert [model.names for model in found.models] == [model.names for model in DEMO]


def test_an_empty_value_leaves_a_setting_open(tmp_path: Path) -> None:
    assert settings(tmp_path, "model: m\nmax_model_len:\n").models == (ModelConfig(model="m"),)
    assert settings(tmp_path, "model: m\nmax_model_len: auto\n").models == (ModelConfig(model="m"),)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("model: m\nmax_num_seq: 4", "there is no setting 'max_num_seq'; did you mean max_num_seqs?"),
        ("model: m\nprot: 1", "there is no setting 'prot'; did you mean port?"),
        ("model: m\nmax_num_seqs: many", "max_num_seqs: "),
        ("model: m\nmax_num_seqs: 1.5", "max_num_seqs: must be a whole number, not 1.5"),
        ("model: m\nmax_num_seqs: true", "max_num_seqs: must be a number, not True"),
        ("model: m\nmax_num_seqs: [1]", "max_num_seqs: "),
        ("model: m\nstrict: 1", "strict: must be true or false, not 1"),
        ("model: m\nrevision: 1.0", "revision: must be text, not 1.0: put it in quotes"),
        ("model: m\ntask: embedd", "task: 'embedd' is not one of"),
        ("model: m\nmax_num_seqs: 4\nmax-num-seqs: 5", "max-num-seqs sets max_num_seqs a second time"),
        ("model: m\nport: 1\nport: 2", ":3: port is set twice"),
        ("model: m\nport:", "port: must be a"),
        ("model: m\nserved_model_name: [1]", "must be text or a list of texts: put numbers in quotes"),
        ("models: []", "models: must be a list with at least one model"),
        ("models: a", "models: must be a list with at least one model"),
        ("models: [a]", "models[0]: must be a mapping such as `model: NAME`, not 'a'"),
        ("models:\n  - model: a\n    prot: 1", "models[0]: there is no setting 'prot'"),
        (
            "models:\n  - model: a\n  - model: b\n    port: 1",
            "models[1]: there is no setting 'port'; it belongs to the top",
        ),
        ("models:\n  - task: embed", "models[0]: no model is named"),
        ("models:\n  - model: a\n    max_num_seqs: 0", "models[0]: --max-num-seqs must be at least 1, not 0"),
        ("model: a\nmodels:\n  - model: b", "model and served_model_name belong to each entry of models:"),
        ("port: 9000", "no model is named: give MODEL"),
        ("port: 9\n\nmodels:\n  - model: a\n    replicas: two", ":5: models[0]: replicas: "),
        ("models:\n  - model: a\n  - model: b\n    devices: [a]", ":4: models[1]: devices: must be a whole number or"),
        (
            "models:\n  - model: b\n    max-model-len: 8\n    replicas: 0",
            ":4: models[0]: --replicas must be at least 1",
        ),
        (
            "models:\n  - model: b\n    url: there\n    task: embed",
            ":3: models[0]: --url must be the address of an API",
        ),
        ("models:\n  - model: b\n    url: http://k@there/v1\n    task: embed", "a key belongs into the variable"),
        ("models:\n  - model: b\n    url: http://there/v1", ":2: models[0]: --url needs --task"),
        (
            "models:\n  - model: b\n    url: http://there/v1\n    task: embed\n    dtype: float32",
            ":5: models[0]: --dtype means nothing for a model of another server (--url http://there/v1): set it there",
        ),
        ("models:\n  - model: b\n    url-api-key-env: KEY", ":3: models[0]: --url-api-key-env needs --url"),
        ("url: http://there/v1\nmodels:\n  - model: b", ":1: url and url_api_key_env belong to entries of models:"),
        ("models:\n  - model: a\n    prot: 1", ":3: models[0]: there is no setting 'prot'"),
        ("- model: m", "must hold settings such as `port: 8000`"),
        ("models: &all\n  - model: a\n    devices: *all", "is nested too deeply, or holds itself"),
        ("model: m\nrequest_timeout: [1]", "request_timeout: must be a number, not [1]"),
        ("model: m\nrequest_timeout: 2020-01-01", "request_timeout: must be a number"),
        ("models:\n  - model: m\n    request_timeout: .nan", "--request-timeout must be above 0, not nan"),
        ("models:\n  - model: m\n    keep_alive: .inf", "--keep-alive must be above 0, not inf"),
        ("models:\n  - model: m\n    served_model_name: ' '", "--served-model-name must be a name, not ' '"),
        ("model: [", "is not YAML"),
        ("", "must hold settings"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text)
    assert answer in caught.value.message
    assert caught.value.exit_code == 2
    if "MODEL" not in answer:
        assert "serve.yaml" in caught.value.message


def test_a_model_of_another_server_takes_of_the_defaults_what_means_something(tmp_path: Path) -> None:
    text = """
max-model-len: 4096
request-timeout: 60
models:
  - model: m
  - model: far
    url: https://there/v1
    task: generate
    url-api-key-env: THERE
"""
    here, there = settings(tmp_path, text).models
    assert here.max_model_len == 4096
    assert there == ModelConfig(
        model="far", url="https://there/v1", task="generate", url_api_key_env="THERE", request_timeout=60.0
    )


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "nowhere.yaml"]) == 2
    assert "cannot read nowhere.yaml: No such file or directory" in capsys.readouterr().err


def test_a_model_is_named_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        settings(tmp_path, "models:\n  - model: a\n", "b")


def test_one_served_name_cannot_name_several_models() -> None:
    with pytest.raises(ConfigError, match="names one model, and there are 3"):
        gather(parser_of("serve").read(["demo", "--served-model-name", "x"]))


def test_the_log_level_comes_from_the_environment_unless_a_flag_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCORE_LOG", "warning")
    assert gather(parser_of("serve").read(["m"])).server.log_level == "warning"
    assert gather(parser_of("serve").read(["m", "--log-level", "error"])).server.log_level == "error"


def test_o06_secrets_are_masked_where_settings_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = []
    monkeypatch.setattr("anycore.cli.serve.serve", lambda *settings, **_: started.append(settings) or 0)
    monkeypatch.setattr("anycore.server.logs.configure", lambda *_: None)
    with caplog.at_level("DEBUG"):
        assert main(["serve", "m", "--api-key", "sk-marker", "--port", "9000"]) == 0
    ((server, models),) = started
    assert server.api_key == ("sk-marker",)
    assert "sk-marker" not in caplog.text + repr(server) + repr(models)
    assert shown(server) == {"port": 9000, "api_key": "***"}
    assert "'api_key': '***'" in caplog.text
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, "model: m\napi_key: [sk-marker, 5]")
    assert "sk-marker" not in caught.value.message
