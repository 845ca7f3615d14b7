"""The answers of /v1/chat/completions: whole, and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from anycore.server.generation import Chunk, Generation
from anycore.server.logprobs import LogprobFormat
from anycore.server.protocol_replies import (
    CalledFunction,
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
from anycore.text.replies.message import Reply, arguments_of, read
from anycore.text.replies.parts import Part, Said, Thought

if TYPE_CHECKING:
    from anycore.server.protocol_generate import ChatBody
    from anycore.server.state import ServedModel


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
        readers = [self._form.reader() for _ in range(self._generation.count)]
        replies = [Reply() for _ in readers]
        for i in range(self._generation.count):
            opening: ChatDelta = {"role": "assistant", "content": self._echo}
            chunk = self._chunk([_part(i, opening)])
            if i == 0:
                self._add_prompt(chunk)
            yield event(chunk)
        async for piece in chunks:
            reader, reply = readers[piece.choice], replies[piece.choice]
            parts = reader.feed(piece.text) if piece.finish is None else reader.end()
            deltas = [delta for delta in (self._delta(reply, part) for part in parts) if delta is not None]
            if piece.finish is None and not deltas and (self._body.logprobs or self._body.return_token_ids):
                deltas.append({"content": ""})
            for i, delta in enumerate(deltas):
                written = _part(piece.choice, delta)
                if i == 0 and piece.finish is None:  # the tokens are those of all parts of the piece
                    written["logprobs"] = self._logprobs(piece)
                    if self._body.return_token_ids:
                        written["token_ids"] = piece.token_ids
                yield event(self._chunk([written]))
            if piece.finish is not None:
                end = _part(piece.choice, {})
                end["finish_reason"], end["stop_reason"] = finish_of(piece, reply), piece.stop_reason
                yield event(self._chunk([end]))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event({**self._chunk([]), "usage": self._generation.usage()})
        yield DONE

    def _delta(self, reply: Reply, part: Part) -> ChatDelta | None:
        """Write one part; None where the request does not want to see it."""
        begun = reply.add(part, self._form)
        if isinstance(part, Said):
            return {"content": part.text}
        if isinstance(part, Thought):
            if not self._body.include_reasoning:
                return None
            return {"reasoning": part.text, "reasoning_content": part.text}
        call: ToolCall = {"index": part.index, "function": {"arguments": part.arguments}}
        if begun is not None:
            function: CalledFunction = {"name": begun.name, "arguments": part.arguments}
            call = {"index": part.index, "id": begun.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def _choice(self, chunk: Chunk) -> ChatChoice:
        reply = read(self._form, chunk.text)
        written: ChatChoice = {
            "index": chunk.choice,
            "message": self._message(reply),
            "logprobs": self._logprobs(chunk),
            "finish_reason": finish_of(chunk, reply),
            "stop_reason": chunk.stop_reason,
        }
        if self._body.return_token_ids:
            written["token_ids"] = chunk.token_ids
        return written

    def _message(self, reply: Reply) -> ChatMessage:
        reply.content = self._echo + reply.content
        message = {"refusal": None, **reply.message()}
        reasoning = message.pop("reasoning", "")
        if reasoning and self._body.include_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return cast(ChatMessage, message)

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


def finish_of(chunk: Chunk, reply: Reply) -> ChatFinish:
    """Why a choice ended, in this API's words. One without an end was cut off.

    A stop string may end a reply in the middle of a call: who is told of calls may rely on their arguments.
    """
    if chunk.finish != "stop" or not reply.calls:
        return chunk.finish or "abort"
    cut = isinstance(chunk.stop_reason, str) and arguments_of(reply.calls[-1]) is None
    return "stop" if cut else "tool_calls"
