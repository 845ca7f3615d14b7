"""Tool calls and reasoning over HTTP: asked for by grammar, and read from replies in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from server.answers import error_of, events_of, ok

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 8}, "limit": {"type": "number", "maximum": 99}},
            "required": ["query", "limit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
HI = [{"role": "user", "content": "Hi"}]


def chat(client: httpx.Client, model: str = "calls", **more: Any) -> httpx.Response:
    body = {"model": model, "messages": HI, "max_tokens": 200, "temperature": 1, "seed": 1, **more}
    return client.post("/v1/chat/completions", json=body)


def gathered(events: list[Any]) -> dict[str, Any]:
    """Put a streamed message together as clients do, checking what each delta may hold."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"id": piece["id"], "type": piece["type"], **piece["function"]})
                else:
                    assert set(piece) == {"index", "function"}
                    assert set(piece["function"]) == {"arguments"}
                    assert isinstance(piece["function"]["arguments"], str)
                    message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
            message["finish"] = choice["finish_reason"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def test_models_say_what_their_replies_may_be(tools_api: httpx.Client) -> None:
    listed = {entry["id"]: entry for entry in ok(tools_api.get("/v1/models"))["data"]}
    keys = ("structured_outputs", "tool_parser", "reasoning_parser")
    assert [listed["calls"][key] for key in keys] == [True, "hermes", None]
    assert [listed["thinks"][key] for key in keys] == [True, "hermes", "think"]


# --- held to a grammar -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["calls", "thinks"])
@pytest.mark.parametrize("seed", range(3))
def test_a09_required_calls_meet_their_schema(tools_api: httpx.Client, model: str, seed: int) -> None:
    options = {"tools": [SEARCH, CLOCK], "tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
    if model == "thinks":
        options["thinking_token_budget"] = 5
    choice = ok(chat(tools_api, model, **options))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    ((name, arguments),) = calls_of(choice["message"])
    if name == "search":
        jsonschema.validate(json.loads(arguments), SEARCH["function"]["parameters"])  # type: ignore[index]
    else:
        assert json.loads(arguments) == {}
    assert ("reasoning" in choice["message"]) <= (model == "thinks")
    for interval in (1, 3, 7):
        streamed = gathered(events_of(chat(tools_api, model, **options, stream=True, stream_interval=interval)))
        assert [(call["name"], call["arguments"]) for call in streamed["tool_calls"]] == [(name, arguments)]
        assert streamed["reasoning"] == choice["message"].get("reasoning", "")
        assert (streamed["content"], streamed["finish"]) == ("", "tool_calls")


def test_a09_a_named_tool_is_the_one_that_is_called(tools_api: httpx.Client) -> None:
    for chosen in (
        {"type": "function", "function": {"name": "search"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [SEARCH]}},
    ):
        got = ok(chat(tools_api, tools=[CLOCK, SEARCH], tool_choice=chosen, parallel_tool_calls=False))["choices"][0]
        assert [name for name, _ in calls_of(got["message"])] == ["search"]


def test_a09_a_limit_ends_the_stream_as_ever(tools_api: httpx.Client) -> None:
    options = {"tools": [SEARCH], "tool_choice": "required", "max_tokens": 24}
    whole = ok(chat(tools_api, **options))["choices"][0]
    streamed = gathered(events_of(chat(tools_api, **options, stream=True)))
    assert whole["finish_reason"] == streamed["finish"] == "length"
    assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == calls_of(whole["message"])


def test_strict_tools_are_held_to_where_the_model_is_free_to_call(tools_api: httpx.Client) -> None:
    """A random model hardly ever calls by itself; a bias towards the mark's token makes it."""
    strict = {"type": "function", "function": {**SEARCH["function"], "strict": True}}  # type: ignore[dict-item]
    for seed in range(3):
        got = ok(chat(tools_api, "thinks", tools=[strict], seed=seed, logit_bias={"448": 100}, thinking_token_budget=0))
        message = got["choices"][0]["message"]
        assert len(calls_of(message)) >= 1 or got["choices"][0]["finish_reason"] == "length"
        for name, arguments in calls_of(message):
            assert name == "search"
            if got["choices"][0]["finish_reason"] == "tool_calls":
                jsonschema.validate(json.loads(arguments), SEARCH["function"]["parameters"])  # type: ignore[index]


def test_a_schema_may_be_kept_to_beside_tools(tools_api: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    message = ok(chat(tools_api, tools=[SEARCH], response_format=form))["choices"][0]["message"]
    assert calls_of(message) or json.loads(message["content"]) in ("yes", "no")


# --- reasoning ---------------------------------------------------------------------------------------------------


def test_a_budget_of_reasoning_is_kept_and_then_the_answer_follows(tools_api: httpx.Client) -> None:
    for budget in (0, 1, 7):
        options = {"thinking_token_budget": budget, "structured_outputs": {"choice": ["done"]}, "logprobs": True}
        choice = ok(chat(tools_api, "thinks", **options))["choices"][0]
        assert choice["message"]["content"] == "done"
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens.index("</think>") <= budget


def test_reasoning_is_left_out_or_switched_off(tools_api: httpx.Client) -> None:
    options = {"thinking_token_budget": 6, "structured_outputs": {"choice": ["done"]}}
    shown = ok(chat(tools_api, "thinks", **options))["choices"][0]["message"]
    assert shown["reasoning"] == shown["reasoning_content"] != ""
    hidden = ok(chat(tools_api, "thinks", **options, include_reasoning=False))["choices"][0]["message"]
    assert hidden["content"] == "done"
    assert "reasoning" not in hidden
    off = ok(chat(tools_api, "thinks", structured_outputs={"choice": ["done"]}, reasoning_effort="none"))["choices"][0]
    assert off["message"] == {"role": "assistant", "content": "done", "refusal": None}


# --- read from replies -------------------------------------------------------------------------------------------

REPLIES = [
    ('<tool_call>{"name": "search", "arguments": {"query": "щ \\" }", "limit": 2}}</tool_call>', None, ""),
    ('Let me see.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "Let me see.", ""),
    ('<think>\nHm.\n</think>\n\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>', None, "Hm."),
    ("<think>Only this", "", "Only this"),
    ("<think>a</think>b < c", "b < c", "a"),
    ("no <tool_call> at all", "no <tool_call> at all", ""),
]


@pytest.mark.parametrize(("reply", "content", "reasoning"), REPLIES)
def test_replies_read_the_same_in_pieces_of_any_size(
    tools_echo: httpx.Client, reply: str, content: str | None, reasoning: str
) -> None:
    body = {"messages": [{"role": "user", "content": reply}], "tools": [SEARCH, CLOCK]}
    choice = ok(chat(tools_echo, "say", **body))["choices"][0]
    message = choice["message"]
    assert ((message["content"] or "").strip(), message.get("reasoning", "")) == (content or "", reasoning)
    assert choice["finish_reason"] == ("tool_calls" if message.get("tool_calls") else "stop")
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(message))
    ids = [call["id"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    for salt in ("tokens=1", "tokens=3", "tokens=7"):
        streamed = gathered(events_of(chat(tools_echo, "say", **body, stream=True, cache_salt=salt)))
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning"] == reasoning
        assert [(c["name"], c["arguments"]) for c in streamed["tool_calls"]] == calls_of(message)
        assert streamed["finish"] == choice["finish_reason"]


def test_without_tools_nothing_is_read_as_a_call(tools_echo: httpx.Client) -> None:
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    for more in ({}, {"tools": [CLOCK], "tool_choice": "none"}):
        message = ok(chat(tools_echo, "say", messages=[{"role": "user", "content": text}], **more))["choices"][0][
            "message"
        ]
        assert message == {"role": "assistant", "content": text, "refusal": None}


# --- refused -----------------------------------------------------------------------------------------------------


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


WRONG = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [tool(name="a b")]}, "tools[0]"),
    ({"tools": [tool(name="x" * 65)]}, "tools[0]"),
    ({"tools": [CLOCK, tool(name="f", parameters=[1])]}, "tools[1]"),
    ({"tools": [tool(name="f", strict="yes")]}, "tools[0]"),
    ({"tools": [tool(name="f", parameters={"type": "array"})]}, "tools[0]"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool(name="f", parameters={"type": "object", "not": {}})], "tool_choice": "required"}, "tools"),
    ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=range(len(WRONG)))
def test_o02_what_is_malformed_is_refused_by_name(tools_api: httpx.Client, fields: Any, param: str) -> None:
    error_of(chat(tools_api, **fields), 400, param)


def test_a_tools_schema_may_count_with_a_point(tools_api: httpx.Client) -> None:
    """JavaScript and pandas write 3 as 3.0, OpenAPI has formats of its own."""
    word = {"type": "string", "minLength": 3.0, "maxLength": 3.0, "format": "password"}
    parameters = {"type": "object", "properties": {"word": word}, "required": ["word"]}
    tools = [{"type": "function", "function": {"name": "say", "parameters": parameters}}]
    body = {"model": "calls", "messages": [{"role": "user", "content": "a"}], "tools": tools, "max_tokens": 200}
    answer = ok(tools_api.post("/v1/chat/completions", json={**body, "tool_choice": "required", "temperature": 0}))
    call = answer["choices"][0]["message"]["tool_calls"][0]
    assert len(json.loads(call["function"]["arguments"])["word"]) == 3


def test_a09_a_stop_string_within_a_call_does_not_finish_it(tools_api: httpx.Client) -> None:
    """finish_reason tool_calls says that arguments are whole."""
    body = {"model": "calls", "messages": [{"role": "user", "content": "a"}], "tools": [SEARCH], "max_tokens": 200}
    body |= {"tool_choice": {"type": "function", "function": {"name": "search"}}, "temperature": 0}
    whole = ok(tools_api.post("/v1/chat/completions", json=body))["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    for stream in (False, True):
        answer = tools_api.post("/v1/chat/completions", json={**body, "stop": ["query"], "stream": stream})
        last = events_of(answer)[-1] if stream else ok(answer)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["choices"][0]["stop_reason"] == "query"
