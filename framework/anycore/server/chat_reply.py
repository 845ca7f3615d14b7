"""The answers of /v1/chat/completions: whole, and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anycore.server.generation import Chunk, Generation
from anycore.server.logprobs import LogprobFormat
from anycore.server.protocol_replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ToolCall,
)
from anycore.server.sse import DONE, event
from anycore.text.replies.form import Form
from anycore.text.replies.parts import Called, Part, Reader, Said, Thought

if TYPE_CHECKING:
    from anycore.server.protocol_generate import ChatBody
    from anycore.server.state import ServedModel


@dataclass(slots=True)
class Choice:
    """One choice while it is read: what its text meant so far, and the names of its calls."""

    reader: Reader
    calls: dict[int, str] = field(default_factory=dict)  # index → id

    def read(self, chunk: Chunk) -> list[Part]:
        """Return the parts that a chunk completes; those of the last one close the reply."""
        return self.reader.end() if chunk.finish is not None else self.reader.feed(chunk.text)

    def finish(self, chunk: Chunk) -> ChatFinish:
        """Why the choice ended, in this API's words. One without an end was cut off."""
        if chunk.finish == "stop" and self.calls:
            return "tool_calls"
        return chunk.finish or "abort"


class ChatReply:
    """The parts of one answer that stay the same, and the two forms it leaves in."""

    def __init__(self, body: ChatBody, model: ServedModel, generation: Generation, form: Form, name: str) -> None:
        self._body = body
        self._generation = generation
        self._form = form
        self._format = LogprobFormat(model.renderer.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._id = f"chatcmpl-{name}"
        self._created = int(time.time())
        self._model = body.model or model.names[0]
        last = body.messages[-1]
        self._echo = last["content"] if body.echo and last["role"] == "assistant" else ""

    def whole(self, choices: list[Chunk]) -> ChatCompletion:
        reply: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(chunk) for chunk in choices],
            "usage": self._generation.usage(),
            "system_fingerprint": None,
        }
        if self._body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = self._format.prompt(self._generation.prompt_logprobs[0])
        self._add_prompt(reply)
        return reply

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        """Role first, content next, the finish reason alone in a choice's last chunk, then usage if asked for."""
        choices = [Choice(self._form.reader()) for _ in range(self._generation.count)]
        for i in range(self._generation.count):
            opening: ChatDelta = {"role": "assistant", "content": self._echo}
            chunk = self._chunk([_part(i, opening)])
            if i == 0:
                self._add_prompt(chunk)
            yield event(chunk)
        async for piece in chunks:
            choice = choices[piece.choice]
            deltas = [delta for delta in map(lambda part, c=choice: self._delta(c, part), choice.read(piece)) if delta]
            if piece.finish is None and not deltas and (self._body.logprobs or self._body.return_token_ids):
                deltas.append({"content": ""})
            for i, delta in enumerate(deltas):
                part = _part(piece.choice, delta)
                if i == 0 and piece.finish is None:  # the tokens are those of all parts of the piece
                    part["logprobs"] = self._logprobs(piece)
                    if self._body.return_token_ids:
                        part["token_ids"] = piece.token_ids
                yield event(self._chunk([part]))
            if piece.finish is not None:
                end = _part(piece.choice, {})
                end["finish_reason"], end["stop_reason"] = choice.finish(piece), piece.stop_reason
                yield event(self._chunk([end]))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event({**self._chunk([]), "usage": self._generation.usage()})
        yield DONE

    def _delta(self, choice: Choice, part: Part) -> ChatDelta | None:
        """Write one part; None where the request does not want to see it."""
        if isinstance(part, Said):
            return {"content": part.text}
        if isinstance(part, Thought):
            if not self._body.include_reasoning:
                return None
            return {"reasoning": part.text, "reasoning_content": part.text}
        call: ToolCall = {"index": part.index, "function": {"arguments": part.arguments}}
        if part.name is not None:
            choice.calls[part.index] = self._new_id()
            call["id"], call["type"] = choice.calls[part.index], "function"
            call["function"] = {"name": part.name, "arguments": part.arguments}
        return {"tool_calls": [call]}

    def _choice(self, chunk: Chunk) -> ChatChoice:
        choice = Choice(self._form.reader())
        message = self._message(choice, [*choice.reader.feed(chunk.text), *choice.reader.end()])
        written: ChatChoice = {
            "index": chunk.choice,
            "message": message,
            "logprobs": self._logprobs(chunk),
            "finish_reason": choice.finish(chunk),
            "stop_reason": chunk.stop_reason,
        }
        if self._body.return_token_ids:
            written["token_ids"] = chunk.token_ids
        return written

    def _message(self, choice: Choice, parts: Iterable[Part]) -> ChatMessage:
        said: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, ToolCall] = {}
        for part in parts:
            if isinstance(part, Said):
                said.append(part.text)
            elif isinstance(part, Thought):
                thoughts.append(part.text)
            else:
                self._add(calls, choice, part)
        content = self._echo + "".join(said)
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = list(calls.values())
        if thoughts and self._body.include_reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
        return message

    def _add(self, calls: dict[int, ToolCall], choice: Choice, part: Called) -> None:
        if part.name is not None:
            choice.calls[part.index] = self._new_id()
            calls[part.index] = {
                "id": choice.calls[part.index],
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        calls[part.index]["function"]["arguments"] += part.arguments

    def _new_id(self) -> str:
        assert self._form.formats.tools is not None
        return self._form.formats.tools.call_id()

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": None,
        }
        options = self._body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self._generation.usage() if options.continuous_usage_stats else None
        return chunk

    def _logprobs(self, chunk: Chunk) -> ChatLogprobs | None:
        return self._format.chat(chunk.logprobs) if self._body.logprobs else None

    def _add_prompt(self, reply: Any) -> None:
        prompt = self._generation.prompts[0]
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = prompt.token_ids
        if self._body.return_prompt_text:
            reply["prompt_text"] = prompt.text


def _part(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
