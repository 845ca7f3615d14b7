"""Tools and reasoning through clients as users have them: the official client's stream helper, and a LangChain loop."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from later import Later
from server.conftest import SAID
from server.test_tools import SEARCH

if TYPE_CHECKING:
    import langchain_openai
    import openai
    from langchain_core import messages, tools
else:
    langchain_openai, openai = Later("langchain_openai"), Later("openai")
    messages, tools = Later("langchain_core.messages"), Later("langchain_core.tools")

CALL = '<tool_call>{"name": "search", "arguments": {"query": "щ", "limit": 2}}</tool_call>'


def search(query: str, limit: int) -> str:
    """Search the web."""
    return f"{limit} results for {query}"


def test_the_official_client_puts_a_stream_together(tools_echo: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{tools_echo.base_url}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": f"<think>Hm.</think>Well. {CALL}{CALL}"}]
    offered: Any = [{**SEARCH, "function": {**SEARCH["function"], "strict": False}}]  # type: ignore[dict-item]
    whole = client.chat.completions.create(model="say", messages=asked, tools=offered).choices[0]
    with client.chat.completions.stream(
        model="say", messages=asked, tools=offered, extra_body={"cache_salt": "tokens=3"}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert (final.message.content or "").strip() == (whole.message.content or "").strip() == "Well."
    for message in (final.message, whole.message):
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]  # type: ignore[union-attr]
        assert calls == [("search", {"query": "щ", "limit": 2})] * 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_langchain_loop_calls_and_goes_on(tools_echo: httpx.Client, streaming: bool) -> None:
    """The model says its last message: a call, then what the tool returned."""
    assert "messages[-1]" in SAID
    found = tools.tool(search)
    model = langchain_openai.ChatOpenAI(
        base_url=f"{tools_echo.base_url}/v1", api_key="none", model="say", streaming=streaming, max_retries=0
    ).bind_tools([found])
    said: list[Any] = [messages.HumanMessage(CALL)]
    first = model.invoke(said)
    assert isinstance(first, messages.AIMessage)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("search", {"query": "щ", "limit": 2})]
    said.append(first)
    for call in first.tool_calls:
        said.append(messages.ToolMessage(found.invoke(call["args"]), tool_call_id=call["id"]))
    last = model.invoke(said)
    assert last.content == "2 results for щ"
    assert not last.tool_calls
