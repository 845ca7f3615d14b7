"""litellm against a running server: as an OpenAI-compatible one, and its four ways to ask for a rerank."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network for prices

if TYPE_CHECKING:
    import litellm
else:
    litellm = Later("litellm")

HI = [{"role": "user", "content": "Hi"}]
DOCUMENTS = ["Paris is the capital", "a fox", "the river bank"]


def options(api: httpx.Client) -> dict[str, Any]:
    return {"api_base": f"{api.base_url}/v1", "api_key": "none", "num_retries": 0}


def said_by(api: httpx.Client) -> dict[str, Any]:
    body = {"model": "lm", "messages": HI, "temperature": 0, "max_tokens": 6}
    found: dict[str, Any] = api.post("/v1/chat/completions", json=body).json()
    return found


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_completion(api: httpx.Client, provider: str) -> None:
    said = litellm.completion(f"{provider}/lm", HI, temperature=0, max_tokens=6, **options(api))
    expected = said_by(api)
    assert said.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert said.choices[0].finish_reason == "length"
    assert said.usage.total_tokens == expected["usage"]["total_tokens"]


def test_acompletion_streams(api: httpx.Client) -> None:
    async def ask() -> tuple[str, Any]:
        text, usage = "", None
        stream = await litellm.acompletion(
            "openai/lm",
            HI,
            temperature=0,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
            **options(api),
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = getattr(chunk, "usage", None) or usage
        return text, usage

    text, usage = asyncio.run(ask())
    expected = said_by(api)
    assert text == expected["choices"][0]["message"]["content"]
    assert usage.completion_tokens == expected["usage"]["completion_tokens"]


def test_text_completion(api: httpx.Client) -> None:
    said = litellm.text_completion(
        model="text-completion-openai/lm", prompt="Paris is", temperature=0, max_tokens=5, **options(api)
    )
    body = {"model": "lm", "prompt": "Paris is", "max_tokens": 5, "temperature": 0}
    assert said.choices[0].text == api.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_e09_embedding(api: httpx.Client, provider: str) -> None:
    texts = ["a river", "a fox"]
    found = litellm.embedding(f"{provider}/bert", input=texts, **options(api))
    expected = api.post("/v1/embeddings", json={"model": "bert", "input": texts}).json()
    for ours, other in zip(found.data, expected["data"], strict=True):
        assert ours["embedding"] == pytest.approx(other["embedding"], abs=1e-6)
    assert found.usage.prompt_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("provider", "path", "document"),
    [
        ("cohere", "/v2/rerank", None),  # whose second version returns no documents
        ("jina_ai", "/v1/rerank", {"text": "the river bank"}),
        ("hosted_vllm", "", {"text": "the river bank"}),
        ("infinity", "", None),  # whose documents are plain strings, which no other client reads
    ],
)
def test_r_rerank(api: httpx.Client, provider: str, path: str, document: Any) -> None:
    found = litellm.rerank(
        f"{provider}/ce",
        query="a river",
        documents=DOCUMENTS,
        top_n=2,
        return_documents=document is not None,
        api_base=f"{api.base_url}{path}".rstrip("/"),
        api_key="none",
    )
    body = {"model": "ce", "query": "a river", "documents": DOCUMENTS}
    expected = api.post("/v1/rerank", json=body).json()["results"][:2]
    assert [result["index"] for result in found.results] == [result["index"] for result in expected]
    assert found.results[0]["relevance_score"] == pytest.approx(expected[0]["relevance_score"])
    assert found.results[0].get("document") == document


def test_an_error_of_the_server_is_raised_as_its_kind(api: httpx.Client) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion("openai/lm", HI, temperature=9, **options(api))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion("openai/nothing", HI, **options(api))
