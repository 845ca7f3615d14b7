"""LangChain's own packages for OpenAI and Cohere, as they come, against a running server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later

if TYPE_CHECKING:
    import cohere
    import langchain_cohere
    import langchain_openai
    from langchain_core import documents, messages
else:
    cohere, langchain_cohere, langchain_openai = map(Later, ("cohere", "langchain_cohere", "langchain_openai"))
    documents, messages = Later("langchain_core.documents"), Later("langchain_core.messages")

ASKED: Any = [("system", "be short"), ("human", "Hi")]


def answer_of(api: httpx.Client, **more: Any) -> dict[str, Any]:
    """What the API says to the same conversation."""
    asked = [{"role": "system", "content": "be short"}, {"role": "user", "content": "Hi"}]
    answer = api.post(
        "/v1/chat/completions", json={"model": "lm", "messages": asked, "temperature": 0, "max_tokens": 6, **more}
    )
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def chat(api: httpx.Client) -> langchain_openai.ChatOpenAI:
    return langchain_openai.ChatOpenAI(
        model="lm",
        base_url=f"{api.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=6,
        max_retries=0,
    )


def test_chat_invoke(api: httpx.Client, chat: langchain_openai.ChatOpenAI) -> None:
    expected = answer_of(api)
    said = chat.invoke(ASKED)
    assert said.content == expected["choices"][0]["message"]["content"]
    assert said.response_metadata["finish_reason"] == "length"
    assert said.response_metadata["model_name"] == "lm"
    assert isinstance(said, messages.AIMessage)
    assert said.usage_metadata is not None
    assert said.usage_metadata["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert said.usage_metadata["output_tokens"] == 6


def test_chat_stream_with_usage(api: httpx.Client, chat: langchain_openai.ChatOpenAI) -> None:
    pieces = list(chat.stream(ASKED, stream_usage=True))
    assert len(pieces) > 2
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    assert whole.content == answer_of(api)["choices"][0]["message"]["content"]
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 6


def test_chat_batch_and_async(api: httpx.Client, chat: langchain_openai.ChatOpenAI) -> None:
    expected = answer_of(api)["choices"][0]["message"]["content"]
    assert [said.content for said in chat.batch([ASKED] * 4)] == [expected] * 4

    async def ask() -> list[str]:
        return [str(piece.content) async for piece in chat.astream(ASKED)]

    assert "".join(asyncio.run(ask())) == expected


def test_chat_options_and_logprobs(api: httpx.Client, chat: langchain_openai.ChatOpenAI) -> None:
    said = chat.bind(logprobs=True, top_logprobs=2, stop=["zzz"], seed=1, n=1).invoke(ASKED)
    expected = answer_of(api, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in said.response_metadata["logprobs"]["content"]] == [
        token["token"] for token in expected
    ]


def test_an_error_of_the_server_is_raised_as_openai_s(chat: langchain_openai.ChatOpenAI) -> None:
    with pytest.raises(Exception, match="temperature") as raised:
        chat.bind(temperature=9).invoke(ASKED)
    assert raised.value.status_code == 400  # type: ignore[attr-defined]


def test_completion(api: httpx.Client) -> None:
    language_model = langchain_openai.OpenAI(
        model="lm",
        base_url=f"{api.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_tokens=5,
    )
    body = {"model": "lm", "prompt": "Paris is", "max_tokens": 5, "temperature": 0}
    expected = api.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert language_model.invoke("Paris is") == expected
    assert "".join(language_model.stream("Paris is")) == expected


def vectors_of(api: httpx.Client, inputs: Any) -> list[list[float]]:
    found = api.post("/v1/embeddings", json={"model": "bert", "input": inputs}).json()
    return [item["embedding"] for item in found["data"]]


def test_e09_embeddings_as_texts(api: httpx.Client) -> None:
    embedder = langchain_openai.OpenAIEmbeddings(
        model="bert",
        base_url=f"{api.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    )
    texts = ["a river", "the capital of France"]
    for ours, other in zip(embedder.embed_documents(texts), vectors_of(api, texts), strict=True):
        assert ours == pytest.approx(other, abs=1e-6)
    assert embedder.embed_query("a river") == pytest.approx(vectors_of(api, "a river")[0], abs=1e-6)


def test_e09_embeddings_as_token_arrays(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it sends ids of a tokenizer of its own, cut to chunks, and averages what comes back."""
    embedder = langchain_openai.OpenAIEmbeddings(
        model="bert",
        base_url=f"{api.base_url}/v1",
        api_key="none",  # type: ignore[arg-type]
        embedding_ctx_length=4,
        chunk_size=2,
    )
    ids = {"short": [5, 6], "a longer text": [7, 8, 9, 10, 11, 12]}
    encoder = type("Encoder", (), {"encode": lambda _, text, **__: ids[text], "encode_ordinary": lambda _, t: ids[t]})()
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda _: encoder)
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: encoder)
    short, long = embedder.embed_documents(list(ids))
    assert short == pytest.approx(vectors_of(api, [[5, 6]])[0], abs=1e-6)
    assert len(long) == len(short)
    assert long != pytest.approx(short, abs=1e-3)


DOCUMENTS = ["Paris is the capital", "a fox", "the river bank"]


def test_r_langchain_cohere_rerank(api: httpx.Client) -> None:
    client = cohere.ClientV2(api_key="none", base_url=str(api.base_url))
    ranker = langchain_cohere.CohereRerank(client=client, model="ce", top_n=2)
    expected = api.post("/v2/rerank", json={"model": "ce", "query": "a river", "documents": DOCUMENTS}).json()
    found = ranker.compress_documents([documents.Document(text) for text in DOCUMENTS], "a river")
    assert [document.page_content for document in found] == [
        DOCUMENTS[result["index"]] for result in expected["results"][:2]
    ]
    assert found[0].metadata["relevance_score"] == pytest.approx(expected["results"][0]["relevance_score"])


@pytest.mark.parametrize("kind", ["Client", "ClientV2"])
def test_r_cohere_s_client(api: httpx.Client, kind: str) -> None:
    client = getattr(cohere, kind)(api_key="none", base_url=str(api.base_url))
    found = client.rerank(model="ce", query="a river", documents=DOCUMENTS, top_n=2)
    expected = api.post("/v1/rerank", json={"model": "ce", "query": "a river", "documents": DOCUMENTS}).json()
    assert [result.index for result in found.results] == [result["index"] for result in expected["results"][:2]]
    assert found.results[0].relevance_score == pytest.approx(expected["results"][0]["relevance_score"])
    assert found.id
    with pytest.raises(cohere.BadRequestError, match="query"):
        client.rerank(model="ce", query="", documents=DOCUMENTS)
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="nothing", query="a", documents=DOCUMENTS)


@pytest.mark.parametrize("kind", ["Client", "ClientV2"])
def test_r_cohere_s_client_embeds(api: httpx.Client, kind: str) -> None:
    client = getattr(cohere, kind)(api_key="none", base_url=str(api.base_url))
    found = client.embed(model="bert", texts=DOCUMENTS, input_type="search_document", embedding_types=["float"])
    ours = api.post("/v1/embeddings", json={"model": "bert", "input": DOCUMENTS}).json()["data"]
    assert found.embeddings.float_ == [pytest.approx(entry["embedding"], abs=1e-6) for entry in ours]
    with pytest.raises(cohere.BadRequestError, match="input_type"):
        client.embed(model="bert", texts=DOCUMENTS, input_type="poem", embedding_types=["float"])
    if kind == "Client":
        plain = client.embed(model="bert", texts=DOCUMENTS)
        assert plain.embeddings == found.embeddings.float_


def test_r_langchain_cohere_embeds(api: httpx.Client) -> None:
    vectors = langchain_cohere.CohereEmbeddings(model="bert", base_url=str(api.base_url), cohere_api_key="none")
    found = vectors.embed_documents(DOCUMENTS)
    ours = api.post("/v1/embeddings", json={"model": "bert", "input": DOCUMENTS}).json()["data"]
    assert found == [pytest.approx(entry["embedding"], abs=1e-6) for entry in ours]
    assert vectors.embed_query(DOCUMENTS[0]) == found[0]
