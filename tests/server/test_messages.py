"""/v1/messages, through Anthropic's client and as raw events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later
from server.answers import ok
from server.conftest import served
from server.harness import serve_here
from server.test_responses import CALL, named_events
from server.test_tools import SEARCH

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = Later("anthropic")

FUNCTION: dict[str, Any] = SEARCH["function"]  # type: ignore[assignment]
TOOL = {"name": "search", "description": "Search", "input_schema": FUNCTION["parameters"]}


@pytest.fixture(scope="module")
def said(tools_echo: httpx.Client) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(tools_echo.base_url), api_key="none", max_retries=0) as client:
        yield client


def say(client: anthropic.Anthropic, text: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return client.messages.create(model="say", max_tokens=300, messages=messages, **more)


def test_a_text_is_answered(said: anthropic.Anthropic) -> None:
    message = say(said, "Grüße, щука!")
    assert [(block.type, block.text) for block in message.content] == [("text", "Grüße, щука!")]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0


def test_thinking_text_and_tool_use_are_blocks(said: anthropic.Anthropic) -> None:
    message = say(said, f"<think>\nHm.\n</think>\n\nWell. {CALL}", tools=[TOOL])
    thought, text, use = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text.strip()) == ("text", "Well.")
    assert (use.type, use.name, use.input) == ("tool_use", "search", {"query": "a", "limit": 1})
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("salt", ["tokens=1", "tokens=3", "tokens=50"])
def test_a_stream_adds_up_to_the_message(said: anthropic.Anthropic, salt: str) -> None:
    text = f"<think>a b</think>Well, {CALL} and {CALL}"
    whole = say(said, text, tools=[TOOL])
    with said.messages.stream(
        model="say",
        max_tokens=300,
        messages=[{"role": "user", "content": text}],
        tools=[TOOL],  # type: ignore[list-item]
        extra_body={"cache_salt": salt},
    ) as stream:
        final = stream.get_final_message()
    plain = [block.model_dump(exclude={"id"}) for block in whole.content]
    assert [block.model_dump(exclude={"id"}) for block in final.content] == plain
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_events_open_and_close_every_block(tools_echo: httpx.Client) -> None:
    body = {
        "model": "say",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": f"<think>a</think>b{CALL}"}],
        "tools": [TOOL],
        "stream": True,
    }
    events = named_events(tools_echo.post("/v1/messages", json=body))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    deltas = {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}


def test_stops_and_limits_have_their_reasons(said: anthropic.Anthropic) -> None:
    message = say(said, "one two three", stop_sequences=["two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    cut = said.messages.create(model="say", max_tokens=2, messages=[{"role": "user", "content": "one two three four"}])
    assert cut.stop_reason == "max_tokens"


def test_a_conversation_goes_through_the_template(tools_api: httpx.Client) -> None:
    """Blocks become the messages of a chat: the same prompt, token for token; and they are counted alike."""
    messages = [
        {"role": "user", "content": "When?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    call = {"function": {"name": "clock", "arguments": {"zone": "x"}}}
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
        {"role": "user", "content": "And now?"},
    ]
    tools = [{"type": "function", "function": {**FUNCTION, "description": "Search"}}]
    body = {"model": "calls", "system": [{"type": "text", "text": "Be brief."}], "messages": messages, "tools": [TOOL]}
    chat = {"model": "calls", "messages": same, "tools": tools, "max_tokens": 2, "temperature": 0}
    expected = ok(tools_api.post("/v1/chat/completions", json=chat))
    got = ok(tools_api.post("/v1/messages", json={**body, "max_tokens": 2, "temperature": 0}))
    used = got["usage"]
    prompt = expected["usage"]["prompt_tokens"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == prompt
    assert got["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert ok(tools_api.post("/v1/messages/count_tokens", json=body)) == {"input_tokens": prompt}


def test_choices_of_tools_and_thinking(tools_api: httpx.Client) -> None:
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    forced = {"type": "tool", "name": "search", "disable_parallel_tool_use": True}
    got = ok(tools_api.post("/v1/messages", json={**body, "model": "calls", "tool_choice": forced}))
    assert [block["name"] for block in got["content"] if block["type"] == "tool_use"] == ["search"]
    thinking = {"type": "enabled", "budget_tokens": 4}
    fields = {"model": "thinks", "thinking": thinking, "tool_choice": {"type": "any"}}
    kinds = [block["type"] for block in ok(tools_api.post("/v1/messages", json={**body, **fields}))["content"]]
    assert "tool_use" in kinds
    assert "text" not in kinds


def test_a_failure_within_a_stream_is_its_last_event(tools_echo: httpx.Client) -> None:
    body = {"model": "say", "max_tokens": 99, "messages": [{"role": "user", "content": "long enough"}], "stream": True}
    events = named_events(tools_echo.post("/v1/messages", json={**body, "cache_salt": "error=engine_dead"}))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["code"] == "engine_dead"


WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"tool_choice": {"type": "perhaps"}}, "tool_choice"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    ({"system": 5}, "system"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=range(len(WRONG)))
def test_o02_errors_have_the_form_that_clients_look_for(tools_api: httpx.Client, fields: Any, param: str) -> None:
    body = {"model": "calls", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **fields}
    response = tools_api.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


def test_o02_a_model_that_is_not_there_is_an_error_of_the_clients_own_kind(tools_api: httpx.Client) -> None:
    body = {"model": "absent", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    response = tools_api.post("/v1/messages", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_the_key_comes_in_the_header_of_its_clients(t_lm: Any) -> None:
    with serve_here(served(t_lm, "lm"), keys=("right",)) as live:
        for key, allowed in (("right", True), ("wrong", False)):
            client = anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0)
            ask = {"model": "lm", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
            if allowed:
                assert client.messages.create(**ask).usage.output_tokens == 1  # type: ignore[call-overload]
            else:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    client.messages.create(**ask)  # type: ignore[call-overload]
                assert json.loads(caught.value.response.text)["type"] == "error"
