"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.server.bodies import JsonRoute
from anycore.server.chat_reply import ChatReply
from anycore.server.conversation import begin
from anycore.server.door import Caller, State, admit, reply_id
from anycore.server.protocol import responses
from anycore.server.protocol_generate import ChatBody
from anycore.server.protocol_replies import ChatCompletion
from anycore.server.sampling import check_sequences
from anycore.server.scopes import INFER
from anycore.server.sse import EventStream, first_of, json_response, unless_gone
from anycore.server.turns import all_turns

router = APIRouter(tags=["generate"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/chat/completions", response_model=None, responses=responses(ChatCompletion, stream=True))
async def chat_completions(request: Request, body: ChatBody, state: State, caller: Caller) -> Response:
    """Answer a conversation; with `stream`, as server-sent events whose data are `chat.completion.chunk` objects."""
    model = admit(state, body, body.model, Task.GENERATE)
    check_sequences(body, state.config.max_request_sequences)
    if body.tool_config is not None:
        turns = await unless_gone(request.receive, all_turns(body, model, caller, state))
        return json_response(turns.written(reply_id(request, body.request_id)))
    generation, form = await begin(body, model, caller, loud=state.config.log_prompts)
    reply = ChatReply(body, model, generation, form, reply_id(request, body.request_id))
    if body.stream:
        return EventStream(reply.events(await first_of(request, generation.chunks())))
    return json_response(reply.whole(await unless_gone(request.receive, generation.whole())))
