"""POST /v1/responses: a chat in the form of OpenAI's Responses API. Nothing is kept from one request to the next."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import AnycoreError
from anycore.server.blocks import Block, Blocks, Change, Event, Kind
from anycore.server.bodies import JsonRoute
from anycore.server.conversation import begin, conversation
from anycore.server.door import Caller, State, admit, here, reply_id
from anycore.server.generation import Chunk, Generation
from anycore.server.named import named_as
from anycore.server.protocol import responses
from anycore.server.protocol_responses import SENT, ResponsesBody
from anycore.server.scopes import INFER
from anycore.server.sse import EventStream, first_of, json_response, named_event, unless_gone
from anycore.text.replies.form import Form

if TYPE_CHECKING:
    from anycore.server.state import ServedModel

router = APIRouter(tags=["generate"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/responses", response_model=None, responses=responses(dict[str, Any], stream=True))
async def create_response(request: Request, body: ResponsesBody, state: State, caller: Caller) -> Response:
    """Answer an input; with `stream`, as the API's events."""
    model = here(admit(state, body, body.model, Task.GENERATE))
    with named_as(SENT):
        generation, form = await begin(body.chat(), model, caller, loud=state.config.log_prompts)
    reply = ResponsesReply(body, model, generation, form, reply_id(request, body.request_id))
    if body.stream:
        return EventStream(reply.events(await first_of(request, generation.chunks())), reply.failed)
    return json_response(await unless_gone(request.receive, reply.whole(generation.chunks())))


@router.post("/v1/responses/input_tokens", response_model=None, responses=responses(dict[str, Any]))
async def input_tokens(body: ResponsesBody, state: State, caller: Caller) -> Response:
    """Count the tokens of an input, as the model would be given them."""
    model = here(admit(state, body, body.model, Task.GENERATE))
    with named_as(SENT):
        rendered = await conversation(body.chat(), model)
    return json_response({"object": "response.input_tokens", "input_tokens": len(rendered.token_ids)})


class ResponsesReply:
    """One answer, in the two forms it leaves in."""

    def __init__(self, body: ResponsesBody, model: ServedModel, generation: Generation, form: Form, name: str) -> None:
        self._body = body
        self._generation = generation
        self._blocks = Blocks(form)
        self._name = name
        self._number = 0
        self._base: dict[str, Any] = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or model.names[0],
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": body.truncation,
        }

    async def whole(self, chunks: AsyncIterator[Chunk]) -> dict[str, Any]:
        async for _ in self._blocks.read(chunks):
            pass
        return self._response()

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        """The response as it is at first, each item as it opens, grows and closes, and the response as it ends."""
        started = {**self._base, "status": "in_progress", "output": [], "error": None, "incomplete_details": None}
        yield self._event("response.created", response={**started, "usage": None})
        yield self._event("response.in_progress", response={**started, "usage": None})
        async for change in self._blocks.read(chunks):
            for event in self._tell(change):
                yield event
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: AnycoreError) -> bytes:
        """The last event of a stream that cannot go on."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _tell(self, change: Event) -> list[bytes]:
        what, block, text = change
        item = self._item(block, "completed" if what is Change.CLOSED else "in_progress")
        place = {"output_index": block.index, "item_id": item["id"]}
        inside = {**place, "content_index": 0}
        opened = [("response.output_item.added", {"output_index": block.index, "item": {**item, **_EMPTY[block.kind]}})]
        closed = [("response.output_item.done", {"output_index": block.index, "item": item})]
        if block.kind is Kind.CALL:
            grew = [("response.function_call_arguments.delta", {**place, "delta": text})]
            name = item["name"]
            done = ("response.function_call_arguments.done", {**place, "name": name, "arguments": block.text})
        elif block.kind is Kind.TEXT:
            part = {"type": "output_text", "annotations": [], "logprobs": []}
            opened.append(("response.content_part.added", {**inside, "part": {**part, "text": ""}}))
            grew = [("response.output_text.delta", {**inside, "delta": text, "logprobs": []})]
            done = ("response.output_text.done", {**inside, "text": block.text, "logprobs": []})
            closed.insert(0, ("response.content_part.done", {**inside, "part": {**part, "text": block.text}}))
        else:
            grew = [("response.reasoning_text.delta", {**inside, "delta": text})]
            done = ("response.reasoning_text.done", {**inside, "text": block.text})
        told = {Change.OPENED: opened, Change.GREW: grew, Change.CLOSED: [done, *closed]}[what]
        return [self._event(kind, **fields) for kind, fields in told]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.call is not None:
            call = block.call
            return {
                "id": f"fc_{self._name}_{block.index}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": block.text,
                "status": status,
            }
        if block.kind is Kind.REASONING:
            content = [{"type": "reasoning_text", "text": block.text}]
            return {
                "id": f"rs_{self._name}_{block.index}",
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{self._name}_{block.index}",
            "type": "message",
            "role": "assistant",
            "content": [part],
            "status": status,
        }

    def _response(self) -> dict[str, Any]:
        cut = self._blocks.last.finish != "stop"
        blocks = self._blocks.blocks
        ends = ["incomplete" if cut and block is blocks[-1] else "completed" for block in blocks]
        used = self._generation.usage()
        return {
            **self._base,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, end) for block, end in zip(blocks, ends, strict=True)],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._blocks.thoughts},
                "total_tokens": used["total_tokens"],
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        written = named_event(kind, {"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return written


_EMPTY: dict[Kind, dict[str, Any]] = {Kind.TEXT: {"content": []}, Kind.REASONING: {"content": []}, Kind.CALL: {}}
"""What an item lacks when it opens."""
