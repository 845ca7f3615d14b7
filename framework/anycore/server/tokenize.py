"""POST /tokenize and /detokenize, also under /v1: what tokenizer and chat template of a model make of a text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.conversation import conversation
from anycore.server.door import Caller, State, admit, offload
from anycore.server.protocol import responses
from anycore.server.protocol_pool import DetokenizeBody, Text, TokenizeBody, Tokens
from anycore.server.scopes import INFER
from anycore.server.sse import json_response
from anycore.text.draft import known_ids

router = APIRouter(tags=["tokens"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/tokenize", response_model=None, responses=responses(Tokens))
@router.post("/v1/tokenize", response_model=None, responses=responses(Tokens))
async def tokenize(body: TokenizeBody, state: State, caller: Caller) -> Response:
    """Return the ids of a text or of a conversation, as completions or chat would send them to the model."""
    model = admit(state, body, body.model, *Task)
    renderer = model.renderer
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("send either prompt or messages", param="prompt", code="missing_required_parameter")
    if body.messages is not None:
        ids = (await conversation(body, model)).token_ids
    else:
        text = body.prompt or ""
        ids = await offload(len(text), renderer.tokenizer.encode, text, body.add_special_tokens is not False)
    reply: Tokens = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [renderer.tokenizer.token(i) for i in ids]
    return json_response(reply)


@router.post("/detokenize", response_model=None, responses=responses(Text))
@router.post("/v1/detokenize", response_model=None, responses=responses(Text))
async def detokenize(body: DetokenizeBody, state: State, caller: Caller) -> Response:
    """Return the text of ids, special tokens included."""
    model = admit(state, body, body.model, *Task)
    ids: list[Any] = known_ids(body.tokens, model.spec.vocab_size, "tokens") if body.tokens else []
    text = await offload(len(ids), model.renderer.tokenizer.decode, ids, skip_special_tokens=False)
    reply: Text = {"prompt": text}
    return json_response(reply)
