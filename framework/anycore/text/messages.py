"""Chat messages in the one form that templates read: `content` is a string, the arguments of tool calls are objects."""

from __future__ import annotations

import json
from typing import Any

from anycore.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_JOINER = "\n"
"""Text parts of one message are joined by this."""


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Return messages as templates read them. Doing it twice changes nothing.

    An assistant's content may be null, absent or an empty list, all of which become "". Keys that are null are dropped.

    Raises:
        BadRequest: naming the place, such as "messages[0].content".
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{path} must be an object with role and content", param=path)
    role = message.get("role")
    if role not in ROLES:
        if "role" not in message:
            raise BadRequest(f"{path}.role is missing: it must be one of {', '.join(ROLES)}", param=f"{path}.role")
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}", param=f"{path}.role")
    if message.get("function_call") is not None:
        raise BadRequest(
            f"{path}.function_call is the former form of a call: give it as an entry of tool_calls",
            param=f"{path}.function_call",
        )
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _content(message.get("content"), role, f"{path}.content")
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{path}.tool_calls")
    # Clients call a model's reasoning by several names; templates read the first two.
    reasoning = next((kept[k] for k in ("reasoning_content", "thinking", "reasoning") if k in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _content(content: Any, role: str, path: str) -> str:
    if isinstance(content, str):
        return content
    if role == "assistant" and (content is None or content == []):
        return ""
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{path} must be a string or a list of text parts", param=path)
    return PART_JOINER.join(_part(part, i, path) for i, part in enumerate(content))


def _part(part: Any, index: int, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise BadRequest(
            f"{path}[{index}] has the type {str(kind)[:40]!r}, not supported here: this model reads type 'text'",
            param=path,
        )
    if not isinstance(part.get(kind), str):
        raise BadRequest(f"{path}[{index}].{kind} must be a string", param=path)
    return str(part[kind])


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{path} must be a list", param=path)
    return [_tool_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{path}.function must be an object with name and arguments", param=path)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise BadRequest(f"{path}.function.arguments is not valid JSON", param=path) from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{path}.function.arguments must be a JSON object", param=path)
    return {**call, "function": {**function, "arguments": arguments}}
