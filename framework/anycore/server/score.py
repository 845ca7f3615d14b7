"""POST /score and /v1/score: text_1 (or queries) against text_2 (or documents), 1 × N or N × N."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, reply_id
from anycore.server.protocol import responses
from anycore.server.protocol_pool import ScoreBody, Scores
from anycore.server.rank import scores_of
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone

router = APIRouter(tags=["rerank"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/score", response_model=None, responses=responses(Scores))
@router.post("/v1/score", response_model=None, responses=responses(Scores))
async def score(request: Request, body: ScoreBody, state: State, caller: Caller) -> Response:
    """Score one query against each document, or as many queries each against its own; in the order of the request."""
    model = admit(state, body, body.model, Task.RERANK)
    first, queries = _side(body, "text_1", "queries")
    second, documents = _side(body, "text_2", "documents")
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"{first} has {len(queries)} entries and {second} {len(documents)}: send one query, or one a document",
            param=first,
        )
    pairs = [(0 if len(queries) == 1 else i, i) for i in range(len(documents))]
    names = ([f"{first}[{i}]" for i in range(len(queries))], [f"{second}[{i}]" for i in range(len(documents))])
    work = scores_of(model, queries, documents, pairs, names, body, caller, state.config.log_prompts)
    scores, used = await unless_gone(request.receive, work)
    state.metrics.scored(model.names[0], len(pairs))
    reply: Scores = {
        "id": f"score-{reply_id(request, body.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or model.names[0],
        "data": [{"object": "score", "index": i, "score": value} for i, value in enumerate(scores)],
        "usage": used,
    }
    return json_response(reply)


def _side(body: ScoreBody, name: str, alias: str) -> tuple[str, list[str]]:
    """Return a side under the one of its two names that was used."""
    given = [(key, value) for key in (name, alias) if (value := getattr(body, key)) is not None]
    if len(given) != 1:
        what = "is missing" if not given else f"and {alias} are the same; send one"
        raise BadRequest(f"{name} {what}", param=name, code=None if given else "missing_required_parameter")
    return given[0]
