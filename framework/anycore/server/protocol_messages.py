"""Chat messages as they arrive: roles and forms of `content` are checked here and brought to the one form that
templates read, a dictionary whose `content` is a string."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.json_schema import WithJsonSchema

from anycore.errors import BadRequest
from anycore.server.protocol import check_text

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_JOINER = "\n"  # text parts of one message are joined by this


def messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages in the form that templates read.

    Raises:
        BadRequest: naming the path, such as "messages[0].content".
    """
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    if len(value) > MAX_MESSAGES:
        raise BadRequest(f"messages takes at most {MAX_MESSAGES} entries, {len(value)} given", param="messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{path} must be an object with role and content", param=path)
    role = value.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}", param=f"{path}.role")
    message = {key: item for key, item in value.items() if item is not None}
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            raise BadRequest(f"{path}.{key} must be a string", param=f"{path}.{key}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
    message["content"] = _content(message, f"{path}.content")
    return message


def _content(message: dict[str, Any], path: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # An assistant's turn that only called tools, or refused, has no content; templates get "", however it was left out.
    silent = message["role"] == "assistant" and any(message.get(k) for k in ("tool_calls", "function_call", "refusal"))
    if content is None and silent:
        return ""
    if not isinstance(content, list) or not (content or silent):
        raise BadRequest(f"{path} must be a string or a list of text parts", param=path)
    return PART_JOINER.join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequest(f'{path} must be an object such as {{"type": "text", "text": "Hi"}}', param=path)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise BadRequest(
            f"{path}.type {str(kind)[:40]!r} is not supported: this model reads parts of type 'text'",
            param=f"{path}.type",
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequest(f"{path}.{kind} must be a string", param=f"{path}.{kind}")
    return text


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn; their arguments, JSON text on the wire, are objects for templates."""
    if not isinstance(value, list):
        raise BadRequest(f"{path} must be a list", param=path)
    calls = []
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{path}[{i}].function must be an object with name and arguments", param=f"{path}[{i}]")
        where = f"{path}[{i}].function.arguments"
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
                check_text(arguments, where)
            except (ValueError, RecursionError):
                raise BadRequest(f"{where} is not valid JSON", param=where) from None
        if not isinstance(arguments, dict):
            raise BadRequest(f"{where} must be a JSON object", param=where)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "tool_call_id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["role"],
}
Messages = Annotated[
    list[dict[str, Any]],
    BeforeValidator(messages),
    WithJsonSchema({"title": "messages", "type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}),
]
