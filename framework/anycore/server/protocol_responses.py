"""Bodies of /v1/responses, and how they become a chat: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from anycore.errors import BadRequest, Unsupported
from anycore.server.protocol import MAX_TOKEN_ID, Body, RequestId
from anycore.server.protocol_generate import MAX_SEED, ChatBody, StreamOptions, chat_body
from anycore.server.protocol_messages import MAX_MESSAGES
from anycore.text.messages import ROLES

STORED = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that need answers to be kept here, which they are not."""
SENT = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat → the one here that it is made of."""
LOGPROBS = "message.output_text.logprobs"


class ReasoningBody(Body):
    effort: str | None = None
    summary: str | None = None


class TextBody(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(Body):
    include_usage: bool = Field(True, description="accepted: the last event always has the usage")
    include_obfuscation: bool = Field(False, description="accepted: nothing is added")


class ResponsesBody(Body):
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED - 1)
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    include: list[str] | None = Field(None, description="accepted, but for logprobs, which replies do not have")
    text: TextBody = Field(default_factory=lambda: TextBody())
    reasoning: ReasoningBody = Field(default_factory=lambda: ReasoningBody())
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] = Field({})
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    request_id: RequestId | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = Field(None, description="accepted; answers are never kept")

    def chat(self) -> ChatBody:
        """Return the same as a body of /v1/chat/completions.

        Raises:
            BadRequest: `input` or `tools` is malformed; `param` names the place.
            Unsupported: something of it is not built.
        """
        for name in STORED:
            if (self.model_extra or {}).get(name):
                raise Unsupported(f"{name} needs answers to be kept, which this server does not do", param=name)
        if LOGPROBS in (self.include or ()):
            raise Unsupported(f"include: no {LOGPROBS} here, /v1/chat/completions has logprobs", param="include")
        messages = messages_of(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        same = "temperature top_p top_k seed parallel_tool_calls chat_template_kwargs priority cache_salt model stream"
        return chat_body(
            {
                **{name: getattr(self, name) for name in same.split()},
                "messages": messages,
                "max_completion_tokens": self.max_output_tokens,
                "reasoning_effort": self.reasoning.effort,
                "response_format": self.text.format,
                "tools": [tool_of(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None,
                "tool_choice": self.tool_choice,
                "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
                "stream_options": StreamOptions() if self.stream else None,
            }
        )


def tool_of(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a tool in the form of chats."""
    if tool.get("type") != "function":
        raise Unsupported(f"{path}.type {str(tool.get('type'))[:40]!r} is not supported: only function is", param=path)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `input` as messages of a chat: calls in a row are one message of the assistant's, with its reasoning."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise BadRequest("input must not be an empty list", param="input")
    if len(given) > MAX_MESSAGES:
        raise BadRequest(f"input takes at most {MAX_MESSAGES} items, {len(given)} given", param="input")
    messages: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(given):
        path = f"input[{i}]"
        kind = item.get("type") or "message"
        if kind == "reasoning":
            said = _content(item.get("content") or [], path)
            thought += said if isinstance(said, str) else "".join(part["text"] for part in said)
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item, path)})
            continue
        if kind not in ("message", "function_call"):
            raise Unsupported(f"{path}.type {str(kind)[:40]!r} is not supported", param=path)
        if kind == "message":
            message = {"role": _role(item, path), "content": _content(item.get("content"), path)}
            if message["content"] == [] and message["role"] != "assistant":
                raise BadRequest(f"{path}.content must not be an empty list", param=f"{path}.content")
        else:
            call = _call(item, path)
            last = messages[-1] if messages and not thought else {}
            message = last if last.get("role") == "assistant" else {"role": "assistant", "content": ""}
            called = message.setdefault("tool_calls", [])
            called.append({"id": item.get("call_id"), "type": "function", "function": call})
            if message is last:
                continue
        if thought and message["role"] == "assistant":
            message["reasoning"], thought = thought, ""
        messages.append(message)
    return messages


def _role(item: dict[str, Any], path: str) -> Any:
    role = item.get("role")
    if role not in ROLES:
        raise BadRequest(f"{path}.role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}", param=f"{path}.role")
    return role


def _call(item: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the function of a call."""
    name, arguments = item.get("name"), item.get("arguments") or {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = None
    if not isinstance(name, str) or not isinstance(read, dict):
        raise BadRequest(f"{path} must have a name, and arguments that are a JSON object in a string", param=path)
    return {"name": name, "arguments": arguments}


def _output(item: dict[str, Any], path: str) -> Any:
    output = item.get("output")
    return output if isinstance(output, str) else _content(output, path)


def _content(content: Any, path: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{path}.content must be a string or a list of parts", param=path)
    return [{"type": "text", "text": _text(part, path)} for part in content]


def _text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
        raise Unsupported(f"{path} has a part of type {str(kind)[:40]!r}: this model reads text", param=path)
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(f"{path}: a part's {key} must be a string", param=path)
    return text
