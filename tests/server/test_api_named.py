"""A10, A11: fields under the names of other APIs, or of other routes, are never read past in silence, and errors name
the field that was sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server.answers import error_of, ok

from anycore.contract.declare import Task
from anycore.errors import Unavailable
from anycore.server.state import resolve_model

USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "lm", "prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"model": "lm", "messages": USER},
    "/v1/responses": {"model": "lm", "input": "a"},
    "/v1/messages": {"model": "lm", "messages": USER, "max_tokens": 2},
    "/v1/embeddings": {"model": "bert", "input": "a"},
    "/v1/rerank": {"model": "ce", "query": "a", "documents": ["b", "c"]},
    "/v1/score": {"model": "ce", "text_1": "a", "text_2": "b"},
    "/tokenize": {"model": "lm", "messages": USER},
}
OTHER_NAMES = [
    ("/v1/chat/completions", "max_output_tokens", 2, "max_tokens"),
    ("/v1/chat/completions", "max_new_tokens", 2, "max_tokens"),
    ("/v1/chat/completions", "stop_sequences", ["a"], "stop"),
    ("/v1/responses", "max_tokens", 2, "max_output_tokens"),
    ("/v1/responses", "max_completion_tokens", 2, "max_output_tokens"),
    ("/v1/messages", "stop", ["a"], "stop_sequences"),
    ("/v1/embeddings", "output_dimension", 8, "dimensions"),
    ("/v1/embeddings", "normalize_embeddings", False, "normalize"),
    ("/v1/embeddings", "task", "retrieval.query", "prompt_name"),
    ("/v1/embeddings", "truncation", True, "truncate"),
    ("/v1/rerank", "instruct", "Find dogs", "instruction"),
    ("/v1/rerank", "top_k", 1, "top_n"),
    ("/v1/rerank", "return_text", True, "return_documents"),
]
OF_OTHERS = [
    ("/v1/responses", "n", 2),
    ("/v1/responses", "stop", ["a"]),
    ("/v1/responses", "top_logprobs", 3),
    ("/v1/responses", "include", ["message.output_text.logprobs"]),
    ("/v1/messages", "n", 2),
    ("/v1/messages", "logprobs", True),
    ("/v1/completions", "top_logprobs", 3),
    ("/v1/chat/completions", "extra_body", {"top_k": 3}),
    ("/v1/embeddings", "embedding_types", ["int8"]),
    ("/v1/embeddings", "output_dtype", "binary"),
    ("/v1/embeddings", "stream", True),
    ("/v1/embeddings", "instruction", "Find dogs"),
    ("/v1/embeddings", "endianness", "big"),
    ("/v1/rerank", "use_activation", False),
    ("/v1/rerank", "max_tokens_per_query", 8),
    ("/v1/rerank", "rank_fields", ["title"]),
    ("/v1/score", "stream", True),
]


def refused(api: httpx.Client, path: str, more: dict[str, Any], param: str, code: str | None = None) -> str:
    """Check that a body with something more is refused for one field; return what is said."""
    answer = api.post(path, json={**BODIES[path], **more})
    if path != "/v1/messages":
        return str(error_of(answer, 400, param, code)["message"])
    error = answer.json()["error"]  # beside which there is a type
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert code in (None, error["code"])
    return str(error["message"])


@pytest.mark.parametrize(("path", "field", "value", "ours"), OTHER_NAMES)
def test_a10_a_field_of_another_api_is_refused_with_its_name_here(
    api: httpx.Client, path: str, field: str, value: Any, ours: str
) -> None:
    assert f"{field} is called {ours} here" in refused(api, path, {field: value}, field, "unknown_field")


def test_a10_both_names_are_one_too_many_and_no_more(api: httpx.Client) -> None:
    used = ok(api.post("/v1/completions", json={**BODIES["/v1/completions"], "max_new_tokens": 9}))["usage"]
    assert used["completion_tokens"] == 2


@pytest.mark.parametrize(("path", "field", "value"), OF_OTHERS)
def test_a11_what_another_route_would_do_is_refused(api: httpx.Client, path: str, field: str, value: Any) -> None:
    assert field in refused(api, path, {field: value}, field, "unsupported")


def test_a11_values_that_ask_for_nothing_pass(api: httpx.Client) -> None:
    for path, more in (
        ("/v1/responses", {"n": 1, "stop": None, "include": ["reasoning.encrypted_content"], "max_output_tokens": 2}),
        ("/v1/embeddings", {"stream": False, "embedding_types": ["float"], "output_dtype": "float"}),
        ("/v1/rerank", {"rank_fields": None, "stream": False}),
        ("/tokenize", {"n": 3, "stream": True, "stop": ["a"], "max_tokens": 5}),  # nothing of it changes the tokens
    ):
        ok(api.post(path, json={**BODIES[path], **more}))


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/responses", {"input": []}, "input", "empty"),
        ("/v1/responses", {"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens 1000000"),
        ("/v1/responses", {"text": {"format": {"type": "x"}}}, "text.format", "text.format.type"),
        ("/v1/responses", {"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "robot"),
        ("/v1/responses", {"input": [{"role": "user", "content": []}]}, "input[0].content", "empty"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 5}]}, "input[0]", "list of parts"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "input[0]", "JSON"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": 5, "arguments": "{}"}]}, "input[0]", "name"),
        ("/v1/responses", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "integer"),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}]}, "messages[0].content[0]", "object"),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "1", "input": {}}]}]}, "messages[0].content[0]", "string"),
        ("/v1/embeddings", {"input_type": "nope"}, "input_type", "nope"),
    ],
)  # fmt: skip
def test_a11_errors_name_what_was_sent(
    api: httpx.Client, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    assert said in refused(api, path, body, param)


def test_a08_reasoning_and_types_of_items_may_be_bare(api: httpx.Client) -> None:
    items = [
        {"role": "user", "content": "a", "type": None},
        {"type": "reasoning", "content": "thought", "summary": []},
        {"role": "assistant", "content": []},
        {"role": "user", "content": "b"},
    ]
    assert ok(api.post("/v1/responses", json={"model": "lm", "input": items, "max_output_tokens": 2}))["output"]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/tokenize"])
def test_m09_a_priority_is_refused_where_requests_have_none(api: httpx.Client, path: str) -> None:
    assert "--scheduling-policy fcfs" in refused(api, path, {"priority": 5}, "priority")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank"])
def test_o06_what_a_request_is_called_cannot_write_lines_of_the_log(api: httpx.Client, path: str) -> None:
    for name in ("a\nb", "a\rb", "\x1b[31m", "a\u2028b"):
        refused(api, path, {"request_id": name}, "request_id")
    short = {"max_output_tokens": 2} if path == "/v1/responses" else {}
    assert "щука 1/2" in ok(api.post(path, json={**BODIES[path], **short, "request_id": "щука 1/2"}))["id"]


def test_a13_tokenize_counts_what_a_chat_with_tools_takes(tools_api: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    chat = {"model": "thinks", "messages": USER, "tools": [tool]}
    told = ok(tools_api.post("/tokenize", json=chat))["count"]
    assert told == ok(tools_api.post("/v1/chat/completions", json={**chat, "max_tokens": 1}))["usage"]["prompt_tokens"]
    without = ok(tools_api.post("/tokenize", json={**chat, "tool_choice": "none"}))["count"]
    assert without == ok(tools_api.post("/tokenize", json={**chat, "tools": None}))["count"] < told
    unthinking = ok(tools_api.post("/tokenize", json={**chat, "reasoning_effort": "none"}))["count"]
    assert unthinking != told
    asked = {"model": "thinks", "input": "Hi", "tools": [{"type": "function", **tool["function"]}]}
    counted = ok(tools_api.post("/v1/responses/input_tokens", json=asked))
    assert counted == {"object": "response.input_tokens", "input_tokens": told}
    error_of(tools_api.post("/v1/responses/input_tokens", json={**asked, "input": []}), 400, "input")


def test_a_request_without_a_name_waits_only_for_the_model_it_is_for() -> None:
    def model(task: Task, ready: bool, planned: bool = True) -> Any:
        def check_ready() -> None:
            if not ready:
                raise Unavailable("loading", code="model_loading")

        card = {"tasks": [task.value]} if planned else {}
        return SimpleNamespace(task=task, card=card, names=(task.value,), remote=False, check_ready=check_ready)

    def found(*models: Any) -> Any:
        state: Any = SimpleNamespace(models=list(models), draining=False)
        return resolve_model(state, None, Task.EMBED)

    embeds = model(Task.EMBED, ready=True)
    assert found(embeds, model(Task.GENERATE, ready=False)) is embeds
    with pytest.raises(Unavailable):
        found(model(Task.EMBED, ready=False), model(Task.GENERATE, ready=True))
    with pytest.raises(Unavailable):  # it may turn out to embed, too
        found(embeds, model(Task.GENERATE, ready=False, planned=False))
