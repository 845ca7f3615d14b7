"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.engine.request import PoolingParams
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, offload, reply_id
from anycore.server.named import named_as
from anycore.server.pooled import pooled, usage_of, vector_of
from anycore.server.protocol import responses
from anycore.server.protocol_pool import Embedding, EmbeddingBody, Embeddings
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone
from anycore.server.state import ServedModel
from anycore.text.render import Rendered

router = APIRouter(tags=["embed"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/embeddings", response_model=None, responses=responses(Embeddings))
async def embeddings(request: Request, body: EmbeddingBody, state: State, caller: Caller) -> Response:
    """Return one vector an input. Texts get the model's special tokens and prompt; token ids are used as they are."""
    model = admit(state, body, body.model, Task.EMBED)
    params = PoolingParams(dimensions=dimensions_of(model, body.dimensions), normalize=body.normalize)
    names = [f"input[{i}]" if len(body.input) > 1 else "input" for i in range(len(body.input))]
    with named_as({} if body.prompt_name is not None else {"prompt_name": "input_type"}):
        rendered = await offload(sum(len(item) for item in body.input), _render, body, model, names)
    work = pooled(model, rendered, names, params, body, caller, state.config.log_prompts)
    answers = await unless_gone(request.receive, work)
    data: list[Embedding] = []
    for i, answer in enumerate(answers):
        vector = vector_of(answer, names[i])
        written = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": written})
    reply: Embeddings = {
        "id": f"embd-{reply_id(request, body.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or model.names[0],
        "data": data,
        "usage": usage_of(rendered, answers),
    }
    return json_response(reply)


def _render(body: EmbeddingBody, model: ServedModel, names: list[str]) -> list[Rendered]:
    truncate, side = body.cut()
    prompt = body.input_type if body.prompt_name is None else body.prompt_name
    renderer = model.renderer
    items = list(zip(body.input, names, strict=True))
    return list(renderer.each(lambda item: renderer.embedding(item[0], prompt, truncate, side, param=item[1]), items))


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
