"""Flags come from the settings' fields: each one round-trips, and a misspelt one is answered with the right one."""

from __future__ import annotations

import json
import sys
from dataclasses import Field, fields
from types import SimpleNamespace
from typing import Any

import pytest

from anycore.cli import local
from anycore.cli.flags import holds_numbers, kind_of, parse_quantity, spellings, switch_flags
from anycore.cli.main import main, parser_of
from anycore.cli.settings import gather, given
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import BadRequest, ConfigError
from anycore.models.catalog import DEMO

CONFIGS = (ModelConfig, ServerConfig)
FIELDS = [(config, item) for config in CONFIGS for item in fields(config)]
REFUSED = {"trust_remote_code"}  # the field exists to be refused by ModelConfig itself
TOGETHER: dict[str, dict[str, Any]] = {
    "url": {"task": "embed"},
    "url_api_key_env": {"task": "embed", "url": "http://other/v1"},
    "quantization_group": {"quantization": "w4a16"},
    "keep_dense": {"quantization": "w8a8"},
    "ssl_keyfile": {"ssl_certfile": "text"},
    "ssl_ca_certs": {"ssl_certfile": "text"},
}
"""Settings that a field wants beside it."""


def names(pair: tuple[type[Any], Field[Any]]) -> str:
    return pair[1].name


def sample(config: type[Any], item: Field[Any]) -> tuple[list[str], Any]:
    """Words for a field and the value they must give, different from its default."""
    kind = kind_of(config, item)
    if item.metadata["choices"]:
        word = next(choice for choice in item.metadata["choices"] if choice != item.default)
        return [word], word
    if holds_numbers(item):
        return ["17"], (17,)
    if kind is tuple:
        return ["one"], ("one",)
    if item.name == "url":
        return ["http://other/v1"], "http://other/v1"
    if item.name == "memory_utilization":
        return ["0.25"], 0.25
    if kind is int:
        return (["2KiB"], 2048) if item.metadata["unit"] else (["17"], 17)
    if kind is float:
        return ["2.5"], 2.5
    return ["text"], "text"


@pytest.mark.parametrize("pair", FIELDS, ids=names)
def test_every_flag_round_trips_in_each_spelling(pair: tuple[type[Any], Field[Any]]) -> None:
    config, item = pair
    parser = parser_of("serve")
    if kind_of(config, item) is bool:
        for name in switch_flags(item):
            options = parser.read(["m", name])
            assert given(options, config)[item.name] is not name.startswith("--no-")
        return
    words, value = sample(config, item)
    for name in spellings(item):
        assert given(parser.read([name, *words]), config)[item.name] == value
        assert given(parser.read([f"{name}={words[0]}"]), config)[item.name] == value
    if item.name not in REFUSED:
        assert getattr(config(**{item.name: value}, **TOGETHER.get(item.name, {})), item.name) == value


@pytest.mark.parametrize("pair", FIELDS, ids=names)
def test_every_flag_is_in_the_help_with_its_words(pair: tuple[type[Any], Field[Any]]) -> None:
    _, item = pair
    text = " ".join(parser_of("serve").format_help().split())
    for name in spellings(item):
        assert name in text
    assert " ".join(item.metadata["help"].split()[:4]) in text


def test_flags_not_given_are_absent() -> None:
    options = parser_of("serve").read(["m"])
    assert given(options, ModelConfig) == {"model": "m"}
    assert given(options, ServerConfig) == {}


def test_the_names_of_vllm_mean_the_same() -> None:
    words = "m --gpu-memory-utilization 0.5 --kv-cache-memory-bytes 1G --no-enable-prefix-caching --max-model-len 8k"
    settings = gather(parser_of("serve").read(words.split()))
    (model,) = settings.models
    assert (model.memory_utilization, model.kv_cache_memory) == (0.5, 2**30)
    assert (model.enable_prefix_caching, model.max_model_len) == (False, 8000)


@pytest.mark.parametrize("name", ["--no-prefix-caching", "--no-enable-prefix-caching"])
def test_prefix_caching_is_switched_off_by_either_name(name: str) -> None:
    assert gather(parser_of("serve").read(["m", name])).models[0].enable_prefix_caching is False


def test_the_last_of_two_opposite_switches_counts() -> None:
    options = parser_of("serve").read(["m", "--no-prefix-caching", "--enable-prefix-caching"])
    assert given(options, ModelConfig)["enable_prefix_caching"] is True


def test_served_names_take_several_words_and_keys_are_given_one_by_one() -> None:
    words = ["--api-key", "one", "--api-key", "two", "m", "--served-model-name", "a", "b"]
    options = parser_of("serve").read(words)
    assert given(options, ServerConfig)["api_key"] == ("one", "two")
    assert given(options, ModelConfig) == {"model": "m", "served_model_name": ("a", "b")}


def test_m01_auto_is_what_is_left_open() -> None:
    """As in vLLM: the longest sequence that fits, against a file that says otherwise."""
    words = ["m", "--max-model-len", "auto", "--memory-utilization", "auto", "--max-num-seqs", "auto"]
    assert ModelConfig(**given(parser_of("serve").read(words), ModelConfig)) == ModelConfig(model="m")


def test_a_model_may_be_named_by_flag() -> None:
    assert given(parser_of("serve").read(["--model", "m"]), ModelConfig) == {"model": "m"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["serve", "--max-num-seq", "4"], "there is no flag --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "m", "--max-num"], "there is no flag --max-num"),  # an abbreviation is not a flag
        (["serve", "m", "--gpu-memory-utilisation=0.5"], "did you mean --gpu-memory-utilization?"),
        (
            ["serve", "m", "--task", "embedd"],
            "'embedd' is not one of auto, generate, embed, rerank; did you mean embed?",
        ),
        (["serve", "m", "--dtype", "bf16"], "'bf16' is not one of auto, float32, bfloat16, float16; did you mean"),
        (["serve", "m", "--device", "gpu"], "must be the index of a device, not 'gpu'; a backend is chosen with"),
        (["serve", "m", "--kv-cache-memory", "4GX"], "must be a number such as 4096, 512MiB or 4GiB, not '4GX'"),
        (["serve", "m", "--max-num-seqs", "many"], "argument --max-num-seqs: must be a whole number, not 'many'"),
        (["serve", "m", "--port", "1.5"], "argument --port: must be a whole number, not '1.5'"),
        (["serve", "m", "--memory-utilization", "90%"], "must be a number, not '90%'"),
        (["serve", "m", "--port", "auto"], "argument --port: must be a whole number, not 'auto'"),
        (["serve", "m", "--max-num-seqs"], "expected one argument"),
        (["serve", "m", "extra"], "unrecognized arguments: extra"),
        (["serve", "m", "--model", "other"], "MODEL is given twice: other and m"),
        (["matrix", "--jsn"], "there is no flag --jsn; did you mean --json?"),
    ],
)
def test_a_misspelling_exits_2_with_the_right_word(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert answer in output.err
    assert "--help lists the flags" in output.err
    assert output.out == ""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1, not 0"),
        (["--memory-utilization", "1.5"], "above 0 and at most 1, not 1.5"),
        (["--port", "70000"], "--port must be between 0 and 65535, not 70000"),
        (["--trust-remote-code"], "--trust-remote-code is refused"),
    ],
)
def test_a_value_out_of_range_exits_2_naming_the_flag(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *words]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1G", 2**30),
        ("4GiB", 4 * 2**30),
        ("4Gi", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1GB", 10**9),
        ("1kB", 1000),
        ("1KB", 1000),
        ("8k", 8000),
        ("8K", 8192),
        ("2TiB", 2**41),
        ("10B", 10),
    ],
)
def test_quantities(text: str, number: int) -> None:
    assert parse_quantity(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "4GX", "-1", "1e9", "0.3", "4 i", "4iB", "1.1.1", "NaN", "٤"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a"):
        parse_quantity(text)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command hands to LLM, which is not loaded here."""
    seen: dict[str, Any] = {}
    fake = SimpleNamespace(LLM=lambda model, **settings: seen.update(settings, model=model))
    monkeypatch.setitem(sys.modules, "anycore.llm", fake)
    return seen


def test_sampling_flags_join_the_override_that_was_given(opened: dict[str, Any]) -> None:
    words = ["m", "hello", "--temperature", "0", "--override-generation-config", '{"top_k": 5, "temperature": 1}']
    with local.open_model(parser_of("generate").read(words), "m", "generate"):
        pass
    assert json.loads(opened["override_generation_config"]) == {"top_k": 5, "temperature": 0.0, "max_tokens": 256}
    assert (opened["model"], opened["task"]) == ("m", "generate")


@pytest.mark.parametrize(
    ("words", "error", "answer"),
    [
        (["--temperature", "5"], BadRequest, "temperature must be between 0 and 2, not 5"),
        (["--override-generation-config", "[1]"], ConfigError, "must be a JSON object, not \\[1\\]"),
        (["--override-generation-config", "{"], ConfigError, "must be a JSON object, not {"),
    ],
)
def test_sampling_that_is_wrong_is_refused_before_anything_is_loaded(
    opened: dict[str, Any], words: list[str], error: type[Exception], answer: str
) -> None:
    opening = local.open_model(parser_of("generate").read(["m", "hello", *words]), "m", "generate")
    with pytest.raises(error, match=answer), opening:
        pass
    assert not opened


def test_a_built_in_list_gives_the_model_for_the_task(opened: dict[str, Any]) -> None:
    for config in DEMO:
        with local.open_model(parser_of("embed").read(["demo", "hello"]), "demo", config.task):
            pass
        assert (opened["model"], opened["task"]) == (config.model, config.task)
        assert opened["served_model_name"] == config.served_model_name


def test_flags_may_stand_between_the_arguments() -> None:
    options = parser_of("generate").read(["m", "--chat", "one", "--max-tokens", "3", "two", "--", "--three"])
    assert (options.model, options.prompts, options.max_tokens) == ("m", ["one", "two", "--three"], 3)
    assert given(parser_of("serve").read(["--port", "1", "m", "--strict"]), ModelConfig) == {"model": "m"}
