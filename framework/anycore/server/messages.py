"""POST /v1/messages and /v1/messages/count_tokens: a chat in the form of Anthropic's Messages API."""

from __future__ import annotations

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
from anycore.server.failures import messages_envelope
from anycore.server.generation import Chunk, Generation
from anycore.server.named import named_as
from anycore.server.protocol import responses
from anycore.server.protocol_anthropic import SENT, CountBody, MessagesBody
from anycore.server.protocol_generate import chat_body
from anycore.server.scopes import INFER
from anycore.server.sse import EventStream, first_of, json_response, named_event, unless_gone
from anycore.text.replies.form import Form
from anycore.text.replies.message import arguments_of

if TYPE_CHECKING:
    from anycore.server.state import ServedModel

router = APIRouter(tags=["generate"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/messages", response_model=None, responses=responses(dict[str, Any], stream=True))
async def create_message(request: Request, body: MessagesBody, state: State, caller: Caller) -> Response:
    """Answer messages; with `stream`, as the API's events."""
    model = here(admit(state, body, body.model, Task.GENERATE))
    with named_as(SENT):
        generation, form = await begin(body.chat(), model, caller, loud=state.config.log_prompts)
    reply = MessagesReply(body, model, generation, form, reply_id(request, None))
    if body.stream:
        return EventStream(reply.events(await first_of(request, generation.chunks())), failed)
    return json_response(await unless_gone(request.receive, reply.whole(generation.chunks())))


@router.post("/v1/messages/count_tokens", response_model=None, responses=responses(dict[str, int]))
async def count_tokens(body: CountBody, state: State, caller: Caller) -> Response:
    """Count the tokens of messages, as the model would be given them."""
    model = here(admit(state, body, body.model, Task.GENERATE))
    rendered = await conversation(chat_body(body.conversation()), model)
    return json_response({"input_tokens": len(rendered.token_ids)})


class MessagesReply:
    """One answer, in the two forms it leaves in."""

    def __init__(self, body: MessagesBody, model: ServedModel, generation: Generation, form: Form, name: str) -> None:
        self._generation = generation
        self._blocks = Blocks(form)
        self._base: dict[str, Any] = {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": body.model or model.names[0],
        }

    async def whole(self, chunks: AsyncIterator[Chunk]) -> dict[str, Any]:
        async for _ in self._blocks.read(chunks):
            pass
        content = [_block(block) for block in self._blocks.blocks]
        return {**self._base, "content": content, **self._end(), "usage": self._usage()}

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        """The message without content, each block as it opens, grows and closes, and how the message ends."""
        empty = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", message=empty)
        async for change in self._blocks.read(chunks):
            for event in _tell(change):
                yield event
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def _end(self) -> dict[str, Any]:
        last = self._blocks.last
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        reason = "max_tokens" if last.finish != "stop" else "tool_use" if self._blocks.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        used = self._generation.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "output_tokens": used["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _block(block: Block) -> dict[str, Any]:
    """Write a block; the arguments of a call that was cut off are left out where they are no JSON."""
    if block.call is not None:
        call = block.call
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call) or {}}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _tell(change: Event) -> list[bytes]:
    what, block, text = change
    if what is Change.CLOSED:
        signed = {"type": "signature_delta", "signature": ""}
        before = (
            [_event("content_block_delta", index=block.index, delta=signed)] if block.kind is Kind.REASONING else []
        )
        return [*before, _event("content_block_stop", index=block.index)]
    if what is Change.OPENED:
        opening = _block(block)
        opening["input" if block.kind is Kind.CALL else _FIELDS[block.kind]] = {} if block.kind is Kind.CALL else ""
        return [_event("content_block_start", index=block.index, content_block=opening)]
    delta = {"type": _DELTAS[block.kind], _FIELDS[block.kind]: text}
    return [_event("content_block_delta", index=block.index, delta=delta)]


_FIELDS = {Kind.TEXT: "text", Kind.REASONING: "thinking", Kind.CALL: "partial_json"}
_DELTAS = {Kind.TEXT: "text_delta", Kind.REASONING: "thinking_delta", Kind.CALL: "input_json_delta"}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def failed(error: AnycoreError) -> bytes:
    """The last event of a stream that cannot go on."""
    return named_event("error", messages_envelope(error))
