"""LlamaIndex's package for chat models of other servers, run by `ci/clients` beside the openai that it asks for."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture(scope="module")
def language_model(api: httpx.Client) -> OpenAILike:
    return OpenAILike(
        model="lm",
        api_base=f"{api.base_url}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        max_tokens=6,
        max_retries=0,
        context_window=512,
    )


def said_by(api: httpx.Client, text: str) -> str:
    body = {"model": "lm", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 6}
    return str(api.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


def test_the_package_has_the_version_that_llamaindex_asks_for() -> None:
    assert openai.__version__.startswith("2.")


def test_chat_whole_and_streamed(api: httpx.Client, language_model: OpenAILike) -> None:
    asked = [ChatMessage(role="user", content="Hi")]
    assert language_model.chat(asked).message.content == said_by(api, "Hi")
    assert list(language_model.stream_chat(asked))[-1].message.content == said_by(api, "Hi")
    assert asyncio.run(language_model.achat(asked)).message.content == said_by(api, "Hi")


def test_complete_by_chat_and_by_completions(api: httpx.Client, language_model: OpenAILike) -> None:
    assert language_model.complete("Hi").text == said_by(api, "Hi")
    plain = language_model.model_copy(update={"is_chat_model": False})
    body = {"model": "lm", "prompt": "Paris is", "max_tokens": 6, "temperature": 0}
    expected = api.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert plain.complete("Paris is").text == expected
    assert "".join(str(piece.delta) for piece in plain.stream_complete("Paris is")) == expected
