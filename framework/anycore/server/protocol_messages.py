"""The `messages` field: checked and brought to the form of templates by `text.messages`, with its JSON schema."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.json_schema import WithJsonSchema

from anycore.errors import BadRequest
from anycore.text.messages import ROLES, normalise

MAX_MESSAGES = 4096

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


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise BadRequest(f"messages takes at most {MAX_MESSAGES} entries, {len(value)} given", param="messages")
    return normalise(value)


Messages = Annotated[
    list[dict[str, Any]],
    BeforeValidator(_messages),
    WithJsonSchema({"title": "messages", "type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}),
]
