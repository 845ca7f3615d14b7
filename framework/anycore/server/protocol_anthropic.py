"""Bodies of /v1/messages, and how they become a chat: https://docs.anthropic.com/en/api/messages."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import Field

from anycore.errors import BadRequest, Unsupported
from anycore.server.protocol import MAX_TOKEN_ID, Body
from anycore.server.protocol_generate import ChatBody, Stop, StreamOptions, chat_body
from anycore.server.protocol_messages import MAX_MESSAGES

SENT = {"thinking_token_budget": "thinking.budget_tokens", "stop": "stop_sequences"}
"""Field of a chat → the one here that it is made of."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(Body):
    only_counts: ClassVar[bool] = True

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def conversation(self) -> dict[str, Any]:
        """Return what of it shapes the prompt, as fields of a ChatBody.

        Raises:
            BadRequest: a block or a tool is malformed; `param` names the place.
            Unsupported: something of it is not built.
        """
        messages = [part for i, message in enumerate(self.messages) for part in _message(message, f"messages[{i}]")]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _texts(self.system, "system")})
        kind = (self.thinking or {}).get("type")
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise BadRequest("thinking.type must be enabled, disabled or adaptive", param="thinking")
        off = {"chat_template_kwargs": {"enable_thinking": False}} if kind == "disabled" else {}
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        return {"model": self.model, "messages": messages, "tools": tools or None, **self._choice(), **off}

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind = self.tool_choice.get("type")
        named = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        choice = named if kind == "tool" else CHOICES.get(str(kind))
        if choice is None:
            raise BadRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice")
        return {"tool_choice": choice, "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use")}


class MessagesBody(CountBody):
    only_counts: ClassVar[bool] = False

    max_tokens: int = Field(ge=1, le=MAX_TOKEN_ID)
    stop_sequences: Stop = Field([])
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    metadata: dict[str, Any] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)

    def chat(self) -> ChatBody:
        """Return the same as a body of /v1/chat/completions; see `conversation`."""
        budget = (self.thinking or {}).get("budget_tokens")
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "priority", "cache_salt")
        return chat_body(
            {
                **self.conversation(),
                **{name: getattr(self, name) for name in same},
                "stop": self.stop_sequences,
                "thinking_token_budget": budget,
                "stream_options": StreamOptions() if self.stream else None,
            }
        )


def _message(message: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the messages of a chat that one is: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{path}.role must be user or assistant, not {str(role)[:40]!r}", param=f"{path}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{path}.content must be a string or a list of blocks", param=f"{path}.content")
    texts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {}
    for i, block in enumerate(content):
        place = f"{path}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append({"type": "text", "text": _string(block.get("text"), place)})
        elif kind == "thinking":
            own["reasoning"] = own.get("reasoning", "") + _string(block.get("thinking"), place)
        elif kind == "tool_use":
            used = block.get("input") or {}
            if not isinstance(used, dict):
                raise BadRequest(f"{place}.input must be an object", param=place)
            function = {"name": _string(block.get("name"), place), "arguments": json.dumps(used)}
            own.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            said = _texts(block.get("content") or "", place)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
        elif kind != "redacted_thinking":  # which only its maker can read
            raise Unsupported(f"{place} is of type {str(kind)[:40]!r}: this model reads text", param=place)
    if texts or own or not results:
        results.append({"role": role, "content": texts or ("" if own else None), **own})
    return results


def _texts(content: Any, path: str) -> str:
    """Return the text of a string or of blocks of text."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise BadRequest(f"{path} must be a string or a list of text blocks", param=path)
        texts.append(_string(block.get("text"), path))
    return "\n".join(texts)


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{path} must hold a string", param=path)
    return value


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise Unsupported(
            f"{path}.type {str(tool['type'])[:40]!r} is not supported: only tools of yours are", param=path
        )
    told = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**told, "parameters": tool.get("input_schema") or {}}}
