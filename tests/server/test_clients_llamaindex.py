"""LlamaIndex's packages against a running server: embeddings, and Jina's rerank client, which it has.

Its package for chat models holds openai to a version below ours: `ci/clients` runs it in an environment of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later

if TYPE_CHECKING:
    from llama_index.core import schema
    from llama_index.embeddings import openai_like
    from llama_index.postprocessor import jinaai_rerank
else:
    schema, openai_like = Later("llama_index.core.schema"), Later("llama_index.embeddings.openai_like")
    jinaai_rerank = Later("llama_index.postprocessor.jinaai_rerank")

DOCUMENTS = ["Paris is the capital", "a fox", "the river bank"]


def vectors_of(api: httpx.Client, inputs: Any, **more: Any) -> list[list[float]]:
    found = api.post("/v1/embeddings", json={"model": "qemb", "input": inputs, **more}).json()
    return [item["embedding"] for item in found["data"]]


@pytest.fixture(scope="module")
def embedder(api: httpx.Client) -> openai_like.OpenAILikeEmbedding:
    return openai_like.OpenAILikeEmbedding(
        model_name="qemb", api_base=f"{api.base_url}/v1", api_key="none", embed_batch_size=2
    )


def test_e09_embeddings(api: httpx.Client, embedder: openai_like.OpenAILikeEmbedding) -> None:
    texts = ["a river", "the capital of France", "a fox"]
    found = embedder.get_text_embedding_batch(texts)
    for ours, other in zip(found, vectors_of(api, texts), strict=True):
        assert ours == pytest.approx(other, abs=1e-6)
    assert embedder.get_query_embedding("a fox") == pytest.approx(found[2], abs=1e-6)
    assert asyncio.run(embedder.aget_text_embedding("a fox")) == pytest.approx(found[2], abs=1e-6)


def test_e09_dimensions(api: httpx.Client) -> None:
    size = len(vectors_of(api, "a")[0]) // 2
    short = openai_like.OpenAILikeEmbedding(
        model_name="qemb", api_base=f"{api.base_url}/v1", api_key="none", dimensions=size, reuse_client=False
    )
    expected = vectors_of(api, "a fox", dimensions=size)[0]
    assert short.get_text_embedding("a fox") == pytest.approx(expected, abs=1e-6)


def test_r_jina_s_rerank(api: httpx.Client) -> None:
    ranker = jinaai_rerank.JinaRerank(model="ce", base_url=f"{api.base_url}/v1", api_key="none", top_n=2)
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in DOCUMENTS]
    found = ranker.postprocess_nodes(nodes, query_str="a river")
    expected = api.post("/v1/rerank", json={"model": "ce", "query": "a river", "documents": DOCUMENTS}).json()
    assert [node.text for node in found] == [DOCUMENTS[result["index"]] for result in expected["results"][:2]]
    assert found[0].score == pytest.approx(expected["results"][0]["relevance_score"])
