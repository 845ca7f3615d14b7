"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import BadRequest, Unsupported
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, reply_id
from anycore.server.generation import Chunk, Generation, Prompt, settings_of
from anycore.server.logprobs import LogprobFormat
from anycore.server.prompts import chat_options, cut_options
from anycore.server.protocol import responses
from anycore.server.protocol_generate import ChatBody
from anycore.server.protocol_replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from anycore.server.sampling import asked_tokens, check_body, sampling_of
from anycore.server.scopes import INFER
from anycore.server.sse import DONE, EventStream, event, first_of, json_response, unless_gone
from anycore.server.state import ServedModel

router = APIRouter(tags=["generate"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/chat/completions", response_model=None, responses=responses(ChatCompletion, stream=True))
async def chat_completions(request: Request, body: ChatBody, state: State, caller: Caller) -> Response:
    """Answer a conversation; with `stream`, as server-sent events whose data are `chat.completion.chunk` objects."""
    model = admit(state, body, body.model, Task.GENERATE)
    _check(body)
    asked = asked_tokens(body)
    options = {**chat_options(body), **cut_options(body)}
    rendered = await asyncio.to_thread(model.renderer.chat, body.messages, **options)
    tokenizer, defaults = model.renderer.tokenizer, model.sampling_defaults.values
    sampling = sampling_of(
        body,
        defaults,
        tokenizer,
        model.spec.vocab_size,
        max_tokens=caller.account.limit_output(asked, defaults.get("max_tokens")),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    settings = settings_of("chat", priority=body.priority, cache_salt=body.cache_salt, tenant=caller.account.tenant)
    generation = Generation(
        model,
        [Prompt(rendered.token_ids, rendered.text)],
        sampling,
        settings,
        caller,
        asked=asked is not None,
        interval=body.stream_interval,
        loud=state.config.log_prompts,
    )
    reply = ChatReply(body, model, generation, reply_id(request, body.request_id))
    if body.stream:
        return EventStream(reply.events(await first_of(request, generation.chunks())))
    return json_response(reply.whole(await unless_gone(request.receive, generation.whole())))


def _check(body: ChatBody) -> None:
    """Refuse combinations of fields that contradict each other."""
    check_body(body)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.tools and body.tool_choice != "none":
        raise Unsupported("tools are not supported by this server; tool_choice: none leaves them aside", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise Unsupported("tool_choice needs tools, which are not supported by this server", param="tool_choice")


class ChatReply:
    """The parts of one answer that stay the same, and the two forms it leaves in."""

    def __init__(self, body: ChatBody, model: ServedModel, generation: Generation, name: str) -> None:
        self._body = body
        self._generation = generation
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
        for i in range(self._generation.count):
            opening: ChatDelta = {"role": "assistant", "content": self._echo}
            chunk = self._chunk([_part(i, opening)])
            if i == 0:
                self._add_prompt(chunk)
            yield event(chunk)
        async for piece in chunks:
            if piece.finish is not None:
                end = _part(piece.choice, {})
                end["finish_reason"], end["stop_reason"] = piece.finish, piece.stop_reason
                yield event(self._chunk([end]))
            elif piece.text or self._body.logprobs or self._body.return_token_ids:
                part = _part(piece.choice, {"content": piece.text})
                part["logprobs"] = self._logprobs(piece)
                if self._body.return_token_ids:
                    part["token_ids"] = piece.token_ids
                yield event(self._chunk([part]))
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield event({**self._chunk([]), "usage": self._generation.usage()})
        yield DONE

    def _choice(self, chunk: Chunk) -> ChatChoice:
        choice: ChatChoice = {
            "index": chunk.choice,
            "message": {"role": "assistant", "content": self._echo + chunk.text, "refusal": None},
            "logprobs": self._logprobs(chunk),
            "finish_reason": chunk.finish or "abort",  # a choice without an end was cut off
            "stop_reason": chunk.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice

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
