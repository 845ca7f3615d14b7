"""/v1/responses, through the official client and as raw events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later
from server.answers import error_of, ok
from server.test_tools import CLOCK, SEARCH

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TOOL = {"type": "function", **SEARCH["function"]}  # type: ignore[dict-item]
CALL = '<tool_call>{"name": "search", "arguments": {"query": "a", "limit": 1}}</tool_call>'


@pytest.fixture(scope="module")
def said(tools_echo: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_echo.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(tools_api: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_api.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(api: httpx.Client, **fields: Any) -> httpx.Response:
    return api.post("/v1/responses", json={"input": "Hi", **fields})


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Check that each event's name is its type; return what they say."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_text_is_answered(said: openai.OpenAI) -> None:
    response = said.responses.create(model="say", input="Grüße, щука!")
    assert response.output_text == "Grüße, щука!"
    assert (response.status, response.error, response.store if hasattr(response, "store") else False)[:2] == (
        "completed",
        None,
    )
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert [item.type for item in response.output] == ["message"]


def test_reasoning_text_and_calls_are_items_of_their_own(said: openai.OpenAI) -> None:
    text = f"<think>\nHm.\n</think>\n\nWell. {CALL}"
    response = said.responses.create(model="say", input=text, tools=[TOOL])  # type: ignore[list-item]
    thought, message, call = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Hm."]
    assert message.type == "message"
    assert response.output_text.strip() == "Well."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("search", {"query": "a", "limit": 1})
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("salt", ["tokens=1", "tokens=3", "tokens=50"])
def test_a_stream_adds_up_to_the_response(said: openai.OpenAI, salt: str) -> None:
    text = f"<think>a b</think>Well, {CALL} and {CALL}"
    stream = said.responses.create(
        model="say",
        input=text,
        tools=[TOOL],  # type: ignore[list-item]
        stream=True,
        extra_body={"cache_salt": salt},
    )
    grown: dict[str, str] = {}
    done: dict[str, str] = {}
    kinds: list[str] = []
    final = None
    for number, event in enumerate(stream):
        assert event.sequence_number == number  # type: ignore[union-attr]
        kinds.append(event.type)
        if event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta  # type: ignore[union-attr, operator]
        elif event.type == "response.output_text.done" or event.type == "response.reasoning_text.done":
            done[event.item_id] = event.text
        elif event.type == "response.function_call_arguments.done":
            done[event.item_id] = event.arguments
        elif event.type == "response.completed":
            final = event.response
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 5
    assert grown == done
    assert final is not None
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert done[final.output[2].id or ""] == '{"query": "a", "limit": 1}'
    whole = said.responses.create(model="say", input=text, tools=[TOOL])  # type: ignore[list-item]
    plain = [item.model_dump(exclude={"id", "call_id"}) for item in whole.output]
    assert [item.model_dump(exclude={"id", "call_id"}) for item in final.output] == plain


def test_a_conversation_goes_through_the_template(tools_api: httpx.Client) -> None:
    """Items become the messages of a chat: the same prompt, token for token."""
    items = [
        {"role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "When?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": '{"zone": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "one"}]},
    ]
    clock = {"function": {"name": "clock", "arguments": "{}"}}
    zoned = {"function": {"name": "clock", "arguments": '{"zone": "x"}'}}
    messages = [
        {"role": "system", "content": "Short."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [clock, zoned]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": "one"},
    ]
    got = ok(post(tools_api, model="calls", input=items, instructions="Short.", max_output_tokens=3, temperature=0))
    chat = {"model": "calls", "messages": messages, "max_tokens": 3, "temperature": 0}
    same = ok(tools_api.post("/v1/chat/completions", json=chat))
    assert got["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert got["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert (got["status"], got["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_formats_and_choices_of_tools_hold(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes"]}, "strict": True}
    text = client.responses.create(model="calls", input="Hi", text={"format": form}).output_text  # type: ignore[arg-type]
    assert json.loads(text) == "yes"
    chosen = {"type": "function", "name": "search"}
    response = client.responses.create(
        model="calls",
        input="Hi",
        tools=[TOOL, {"type": "function", **CLOCK["function"]}],  # type: ignore[list-item, dict-item]
        tool_choice=chosen,  # type: ignore[arg-type]
        parallel_tool_calls=False,
        temperature=1,
    )
    assert [item.name for item in response.output if item.type == "function_call"] == ["search"]


def test_a_failure_within_a_stream_is_its_last_event(tools_echo: httpx.Client) -> None:
    fields = {"model": "say", "input": "long enough", "cache_salt": "error=engine_dead", "stream": True}
    events = named_events(post(tools_echo, **fields))
    assert events[-1]["type"] == "error"
    assert events[-1]["code"] == "engine_dead"


WRONG = [
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": []}, "input"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=range(len(WRONG)))
def test_o02_what_is_wrong_is_refused_by_name(tools_api: httpx.Client, fields: Any, param: str) -> None:
    error_of(post(tools_api, model="calls", **fields), 400, param)
