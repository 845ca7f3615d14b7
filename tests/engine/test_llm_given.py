"""What Python programs hand to `LLM`: arrays, generators, single texts, and values of the wrong type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anycore import LLM, Beams, SamplingParams
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import BadRequest, ConfigError

GREEDY = SamplingParams(max_tokens=4, temperature=0)
SETTINGS: dict[str, Any] = {"backend": "cpu", "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def llm(t_lm: Path) -> LLM:
    return LLM(str(t_lm), task="generate", kv_cache_memory=4 << 20, **SETTINGS)


@pytest.fixture(scope="module")
def reranker(t_ce: Path) -> LLM:
    return LLM(str(t_ce), task="rerank", **SETTINGS)


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6, 7]],
        (5, 6, 7),
        np.array([5, 6, 7]),
        list(np.array([5, 6, 7])),
        [np.array([5, 6, 7])],
        np.array([[5, 6, 7]]),
        torch.tensor([5, 6, 7]),
        [torch.tensor([5, 6, 7])],
        iter([[5, 6, 7]]),
    ],
)
def test_token_ids_may_come_in_arrays(llm: LLM, prompts: Any) -> None:
    expected = [output.token_ids for output in llm.generate([5, 6, 7], GREEDY)]
    assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected


@pytest.mark.parametrize("given", [iter, tuple, np.array])
def test_texts_may_come_in_anything_that_can_be_gone_through(llm: LLM, given: Callable[..., Any]) -> None:
    texts = ["One", "Two, three"]
    expected = [output.token_ids for output in llm.generate(texts, GREEDY)]
    assert [output.token_ids for output in llm.generate(given(texts), GREEDY)] == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a text or a list, not NoneType"),
        (b"abc", "prompts must be a text or a list, not bytes"),  # a row of whole numbers, too
        ({"prompt": "a"}, "prompts must be a text or a list, not dict"),
        (np.array(5), "not int"),
        ([None], "prompt must be text or a list of at least one token id"),
        ([np.array([1.5])], "'1.5' at position 0 is not a token id"),
        ([True, 5], "'True' at position 0 is not a token id"),
        (["a", []], r"prompts?\[1\] must be text"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.generate(prompts, GREEDY)


def test_params_are_sampling_params(llm: LLM) -> None:
    for params in ({"max_tokens": 2}, [{"max_tokens": 2}], [None], "greedy"):
        with pytest.raises(BadRequest, match="params"):
            llm.generate("a", params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": "3"}, "max_tokens must be a number, not '3'"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"max_tokens": True}, "max_tokens must be a number, not True"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": None}, "temperature must be a number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"n": 2.0}, "n must be a whole number"),
        ({"stop": 5}, "stop must hold texts, not be 5"),
        ({"stop": (None,)}, "stop must hold texts, not None"),
        ({"stop_token_ids": 5}, "stop_token_ids must hold token ids, not be 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must hold token ids, not 'a'"),
        ({"logit_bias": {"5": 1}}, "logit_bias must hold token ids, not '5'"),
        ({"logit_bias": {5: "x"}}, "logit_bias must be a number"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids must hold token ids"),
        ({"logprobs": "2"}, "logprobs must be a number"),
        ({"bad_words_ids": (5,)}, "bad_words_ids must hold token ids, not be 5"),
        ({"bad_words_ids": "x"}, "bad_words_ids must hold token ids, not be 'x'"),
        ({"beams": 3}, "beams must be Beams, not 3"),
    ],
)
def test_s04_values_of_the_wrong_type_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams(**values)


def test_a04_a_stream_has_one_sequence(llm: LLM) -> None:
    """The texts of several were mixed."""
    with pytest.raises(BadRequest, match="a stream has one sequence, and n is 2"):
        list(llm.stream_chat([{"role": "user", "content": "a"}], SamplingParams(n=2, max_tokens=2)))


def test_conversations_may_come_in_anything_that_can_be_gone_through(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "a"}]
    expected = llm.chat(conversation, GREEDY)[0].token_ids
    assert [output.token_ids for output in llm.chat(iter(conversation), GREEDY)] == [expected]  # type: ignore[arg-type]
    assert [output.token_ids for output in llm.chat(iter([conversation]), GREEDY)] == [expected]  # type: ignore[arg-type]
    for messages in (None, "abc", 5, {"role": "user"}):
        with pytest.raises(BadRequest, match="messages must be"):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]


def test_lengths_of_the_wrong_type_are_named(t_bert: Path) -> None:
    embedder = LLM(str(t_bert), task="embed", **SETTINGS)
    for dimensions in ("8", 8.5, True):
        with pytest.raises(BadRequest, match="dimensions must be a"):
            embedder.embed("a", dimensions=dimensions)  # type: ignore[arg-type]
    for truncate in ("x", 5.5):
        with pytest.raises(BadRequest, match="truncate_prompt_tokens must be True, False or a count of tokens"):
            embedder.embed("a", truncate=truncate)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=(np.int64(3),))
    assert params.max_tokens == 3
    with pytest.raises(BadRequest):
        Beams(width=2.5)  # type: ignore[arg-type]


def test_a02_a_stop_string_alone_is_one(llm: LLM) -> None:
    """Its characters were stop strings each."""
    text = llm.generate("The capital", SamplingParams(max_tokens=30, temperature=0))[0].text
    stop = text[6:9]
    held = llm.generate("The capital", SamplingParams(max_tokens=30, temperature=0, stop=stop))[0]  # type: ignore[arg-type]
    assert (held.text, held.stop_reason) == (text[: text.index(stop)], stop)


def test_e12_documents_of_python(reranker: LLM) -> None:
    expected = reranker.rerank("q", ["abc", "xyz"])
    assert reranker.rerank("q", iter(["abc", "xyz"])) == expected
    assert reranker.rerank("q", np.array(["abc", "xyz"])) == expected
    assert reranker.rerank("q", "abc") == reranker.rerank("q", ["abc"])  # its characters were documents each
    assert reranker.rerank("q", ["abc", "xyz"], top_n=1) == expected[:1]
    for top_n in (0, -1, 1.5):  # -1 left out the last
        with pytest.raises(BadRequest, match="top_n"):
            reranker.rerank("q", ["abc", "xyz"], top_n=top_n)  # type: ignore[arg-type]
    for query, documents, message in [
        ("q", ["a", {"text": "b"}], r"documents\[1\] must be a text \(str\), not dict"),
        (None, ["a"], "query must be a text"),
        (["p", "q"], ["a"], "query must be a text"),
        ("q", ["a", "long " * 500], r"documents\[1\] has 2004 tokens"),
        ("q", 5, "documents must be a text or a list, not int"),
    ]:
        with pytest.raises(BadRequest, match=message):
            reranker.rerank(query, documents)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": "64"}, "--max-model-len must be a whole number, not '64'"),
        ({"max_model_len": 64.0}, "--max-model-len must be a whole number"),
        ({"device": True}, "--device must be a whole number"),
        ({"keep_dense": "layers.0.*"}, "--keep-dense must be a list"),  # its characters were patterns each
        ({"enable_prefix_caching": None}, "--enable-prefix-caching must be True or False"),
        ({"dtype": torch.float32}, "--dtype must be text"),
    ],
)
def test_settings_of_the_wrong_type_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("nowhere", **settings)


def test_lists_and_whole_numbers_are_settings() -> None:
    config = ModelConfig(model="m", devices=[0, 1], replicas=2, request_timeout=5)  # type: ignore[arg-type]
    assert (config.devices, config.request_timeout) == ((0, 1), 5)
    with pytest.raises(ConfigError, match="--port must be a whole number"):
        ServerConfig(port="8000")  # type: ignore[arg-type]
