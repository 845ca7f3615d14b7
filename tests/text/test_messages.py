"""The forms of messages."""

from __future__ import annotations

from typing import Any

import pytest

from anycore.errors import BadRequest
from anycore.text.messages import normalise

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_a08_an_assistant_without_content() -> None:
    variants = [{"content": None}, {}, {"content": ""}, {"content": []}]
    chats = [normalise([{"role": "assistant", "tool_calls": [CALL], **variant}]) for variant in variants]
    assert all(chat == chats[0] for chat in chats)
    assert chats[0][0]["content"] == ""
    assert chats[0][0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a08_text_parts() -> None:
    text = normalise([{"role": "user", "content": "Hi"}])
    assert normalise([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]) == text
    two = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert normalise([{"role": "user", "content": two}])[0]["content"] == "Hi\nthere"
    assert normalise([{"role": "user", "content": "x", "tool_calls": None, "name": None}]) == [
        {"role": "user", "content": "x"}
    ]


def test_doing_it_twice_changes_nothing() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    once = normalise(messages)
    assert normalise(once) == once
    assert once[1]["reasoning_content"] == once[1]["thinking"] == "hm"


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user", "content": None}, "messages[0].content", "must be a string"),
        ({"role": "user"}, "messages[0].content", "must be a string"),
        ({"role": "user", "content": []}, "messages[0].content", "must be a string"),
        ({"role": "user", "content": 5}, "messages[0].content", "must be a string"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content", "'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content", r"\[0\].text must be a string"),
        ({"role": "user", "content": [7]}, "messages[0].content", r"content\[0\]"),
        ({"role": "king", "content": "x"}, "messages[0].role", "'king'"),
        ({"content": "x"}, "messages[0].role", "is missing"),
        ("hello", "messages[0]", "must be an object"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]", "function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0]",
            "not valid JSON",
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            "messages[0].function_call",
            "tool_calls",
        ),
    ],
)
def test_a08_what_is_refused(message: Any, param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        normalise([message])
    assert caught.value.param == param


@pytest.mark.parametrize("messages", [[], None, "hi", {}])
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(BadRequest, match="at least one message"):
        normalise(messages)
