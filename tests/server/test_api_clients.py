"""Clients as users have them: the official openai package, a plain reader of events, a fuzzer of our own document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from later import Later
from server.harness import Live

if TYPE_CHECKING:
    import openai
    import schemathesis
    from schemathesis.specs.openapi import checks
else:
    openai, schemathesis = Later("openai"), Later("schemathesis")
    checks = Later("schemathesis.specs.openapi.checks")

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def sdk(api: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="lm", messages=HI, max_completion_tokens=5, seed=1, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None
    stream = sdk.chat.completions.create(
        model="lm", messages=HI, max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    whole = sdk.chat.completions.create(model="lm", messages=HI, max_tokens=5, temperature=0)
    assert text == whole.choices[0].message.content
    assert usage == whole.usage or (usage and whole.usage and usage.total_tokens == whole.usage.total_tokens)


def test_completions(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="lm", prompt="Paris is", max_tokens=5, temperature=0, logprobs=1, echo=True)
    assert whole.choices[0].text.startswith("Paris is")
    chunks = sdk.completions.create(model="lm", prompt="Paris is", max_tokens=5, temperature=0, echo=True, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text


def test_e09_embeddings_with_and_without_a_format(sdk: openai.OpenAI) -> None:
    default = sdk.embeddings.create(model="bert", input=["a", "b"])  # the package asks for base64 and decodes it
    floats = sdk.embeddings.create(model="bert", input=["a", "b"], encoding_format="float")
    for ours, other in zip(default.data, floats.data, strict=True):
        assert ours.embedding == pytest.approx(other.embedding, abs=1e-7)
    ids = sdk.embeddings.create(model="bert", input=[[5, 6], [7]])
    assert ids.usage.prompt_tokens == 3


def test_errors_have_a_body(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="nothing", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model="lm", messages=HI, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        sdk.embeddings.create(model="lm", input="a")


def test_a_plain_reader_of_events(api: httpx.Client) -> None:
    body = {"model": "lm", "messages": HI, "stream": True, "max_tokens": 5}
    seen = []
    with api.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["cache-control"] == "no-cache"
        seen = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in seen)
    assert seen[-1] == "data: [DONE]"


FUZZED = {
    "/v1/chat/completions": "say",
    "/v1/completions": "say",
    "/v1/embeddings": "vector",
    "/v1/rerank": "ce",
    "/v2/rerank": "qrr",
    "/rerank": "ce",
    "/v2/embed": "vector",
    "/embed": "vector",
    "/similarity": "vector",
    "/classify": "ce",
    "/predict": "ce",
    "/v1/score": "cosine",
    "/tokenize": "lm",
    "/detokenize": "lm",
}


@pytest.mark.parametrize("path", FUZZED)
def test_a_fuzzer_finds_no_crash_and_no_undocumented_answer(api: httpx.Client, echo: Live, path: str) -> None:
    model = FUZZED[path]
    url = echo.url if model in ("say", "vector") else str(api.base_url)
    found_out = (
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    )
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path]["POST"]

    @given(operation.as_strategy())
    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def fuzz(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), (str, type(None))):
            case.body["model"] = model  # what lies behind an unknown model is seen by nobody
        case.call_and_validate(checks=found_out)

    fuzz()
