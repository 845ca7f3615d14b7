"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from anycore.contract.declare import Task
from anycore.engine.request import PoolingParams
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.door import Call, Caller, State, admit, offload, reply_id
from anycore.server.named import named_as
from anycore.server.pooled import pooled, usage_of, vector_of
from anycore.server.protocol import responses
from anycore.server.protocol_pool import Embedding, EmbeddingBody, Embeddings, PoolBody, PoolUsage
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone
from anycore.server.state import ServedModel, ServerState
from anycore.text.draft import Rendered

router = APIRouter(tags=["embed"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/embeddings", response_model=None, responses=responses(Embeddings))
async def embeddings(request: Request, body: EmbeddingBody, state: State, caller: Caller) -> Response:
    """Return one vector an input. Texts get the model's special tokens and prompt, messages its template; ids stay."""
    model = admit(state, body, body.model, Task.EMBED)
    params = PoolingParams(dimensions=dimensions_of(model, body.dimensions), normalize=body.normalize)
    if body.messages is not None:
        names, rendered = ["messages"], [await conversation_of(model, body)]
    else:
        given = texts_of(body)
        names = names_of(given, "input")
        prompt = body.input_type if body.prompt_name is None else body.prompt_name
        with named_as({} if body.prompt_name is not None else {"prompt_name": "input_type"}):
            rendered = await rendered_of(model, given, names, prompt, *body.cut())
    vectors, used = await vectors_of(request, state, caller, model, rendered, names, params, body)
    data: list[Embedding] = []
    for i, vector in enumerate(vectors):
        written = in_base64(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": written})
    reply: Embeddings = {
        "id": f"embd-{reply_id(request, body.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or model.names[0],
        "data": data,
        "usage": used,
    }
    return json_response(reply)


OF_CHAT: dict[str, Any] = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "add_special_tokens": True,
    "chat_template": None,
    "chat_template_kwargs": {},
}
"""What shapes the text of messages, and the values that say of other inputs what becomes of them anyway."""


def texts_of(body: EmbeddingBody) -> list[str | list[int]]:
    """Return the inputs of a body without messages.

    Raises:
        BadRequest: there are none, or a field says how messages are to be put into words.
    """
    for name, as_usual in OF_CHAT.items():
        if name in body.model_fields_set and getattr(body, name) != as_usual:
            raise BadRequest(f"{name} goes with messages, not with input", param=name)
    if body.input is None:
        raise BadRequest("send either input or messages", param="input", code="missing_required_parameter")
    return body.input


async def conversation_of(model: ServedModel, body: EmbeddingBody) -> Rendered:
    """Put messages into the words of the model's chat template.

    Raises:
        BadRequest: there is input, too, or something is put before it that only goes before input.
    """
    for name in ("input", "prompt_name", "input_type"):
        if getattr(body, name) is not None:
            raise BadRequest(f"{name} does not go with messages: send one", param=name)
    assert body.messages is not None
    truncate, side = body.cut()
    options = {name: getattr(body, name) for name in OF_CHAT}
    chat = partial(model.renderer.chat, body.messages, **options, truncate=truncate, side=side, room=0)
    return await asyncio.to_thread(chat)  # templates run elsewhere


def names_of(items: Sequence[Any], field: str) -> list[str]:
    """What errors call each input."""
    return [f"{field}[{i}]" if len(items) > 1 else field for i in range(len(items))]


async def rendered_of(
    model: ServedModel,
    items: Sequence[str | list[int]],
    names: list[str],
    prompt: str | None,
    truncate: int | None,
    side: str,
) -> list[Rendered]:
    """Render texts with the prompt of this name, and ids as they are.

    Raises:
        BadRequest: naming the input.
    """
    renderer = model.renderer

    def render() -> list[Rendered]:
        pairs = list(zip(items, names, strict=True))
        return list(renderer.each(lambda p: renderer.pooled.embedding(p[0], prompt, truncate, side, param=p[1]), pairs))

    return await offload(sum(map(len, items)), render)


async def vectors_of(
    request: Request,
    state: ServerState,
    caller: Call,
    model: ServedModel,
    rendered: list[Rendered],
    names: list[str],
    params: PoolingParams,
    body: PoolBody,
) -> tuple[list[NDArray[np.float32]], PoolUsage]:
    """Return a vector of each input, and what they cost.

    Raises:
        NonFiniteOutput: naming the input.
    """
    work = pooled(model, rendered, names, params, body, caller, state.config.log_prompts)
    answers = await unless_gone(request.receive, work)
    vectors = [vector_of(answer, name) for answer, name in zip(answers, names, strict=True)]
    return vectors, usage_of(rendered, answers)


def in_base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def dimensions_of(model: ServedModel, asked: int | None) -> int | None:
    """Return the dimensions asked for, if the model has vectors of so many.

    Raises:
        BadRequest: naming what there is.
    """
    if asked is None:
        return None
    declared = model.spec.pooling.matryoshka if model.spec.pooling else ()
    size = model.spec.vector_size
    if declared and asked not in (*declared, size):
        known = ", ".join(map(str, sorted({*declared, size})))
        raise BadRequest(f"dimensions must be one of {known}, not {asked}", param="dimensions")
    if asked > size:
        raise BadRequest(f"dimensions must be between 1 and {size}, not {asked}", param="dimensions")
    return asked
