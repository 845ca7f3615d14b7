"""POST /rerank, /v1/rerank (Jina's and Cohere's first shape), /v2/rerank (Cohere's second); /rerank also in TEI's."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.door import Call, Caller, State, admit, reply_id
from anycore.server.protocol import responses
from anycore.server.protocol_pool import (
    PoolUsage,
    QueryBody,
    Rerank,
    RerankBody,
    RerankEitherBody,
    RerankResult,
    TextScore,
)
from anycore.server.rank import scores_of
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone
from anycore.server.state import ServedModel, ServerState

router = APIRouter(tags=["rerank"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/v1/rerank", response_model=None, responses=responses(Rerank))
@router.post("/v2/rerank", response_model=None, responses=responses(Rerank))
async def rerank(request: Request, body: RerankBody, state: State, caller: Caller) -> Response:
    """Sort documents by relevance to a query, the best first; equal scores keep the order of the request."""
    return await _as_jina(request, body, body.documents, state, caller)


@router.post("/rerank", response_model=None, responses=responses(Rerank | list[TextScore]))
async def rerank_either(request: Request, body: RerankEitherBody, state: State, caller: Caller) -> Response:
    """Do the same; with `texts` instead of `documents` the answer is a bare list, as of text-embeddings-inference."""
    documents, texts = body.documents, body.texts
    if (documents is None) == (texts is None):
        raise BadRequest("send either documents or texts", param="documents", code="missing_required_parameter")
    if documents is not None:
        if body.return_text:
            raise BadRequest("return_text goes with texts; documents have return_documents", param="return_text")
        return await _as_jina(request, body, documents, state, caller)
    assert texts is not None
    if body.return_documents:
        raise BadRequest("return_documents goes with documents; texts have return_text", param="return_documents")
    model = admit(state, body, body.model, Task.RERANK)
    order, scores, _ = await _ranked(request, body, texts, "texts", model, state, caller)
    found: list[TextScore] = []
    for i in order:
        entry: TextScore = {"index": i, "score": scores[i]}
        if body.return_text:
            entry["text"] = texts[i]
        found.append(entry)
    return json_response(found)


async def _as_jina(
    request: Request, body: QueryBody, documents: list[str], state: ServerState, caller: Call
) -> Response:
    model = admit(state, body, body.model, Task.RERANK)
    order, scores, used = await _ranked(request, body, documents, "documents", model, state, caller)
    results: list[RerankResult] = []
    for i in order:
        result: RerankResult = {"index": i, "relevance_score": scores[i]}
        if body.return_documents:
            result["document"] = {"text": documents[i]}
        results.append(result)
    reply: Rerank = {
        "id": f"rerank-{reply_id(request, body.request_id)}",
        "model": body.model or model.names[0],
        "results": results,
        "usage": used,
    }
    if request.url.path == "/v2/rerank":
        reply["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return json_response(reply)


async def _ranked(
    request: Request,
    body: QueryBody,
    documents: list[str],
    field: str,
    model: ServedModel,
    state: ServerState,
    caller: Call,
) -> tuple[list[int], list[float], PoolUsage]:
    """Score documents; return the positions of those that are wanted, best first, all scores, and what it cost."""
    names = (["query"], [f"{field}[{i}]" for i in range(len(documents))])
    pairs = [(0, i) for i in range(len(documents))]
    work = scores_of(model, [body.query], documents, pairs, names, body, caller, state.config.log_prompts)
    scores, used = await unless_gone(request.receive, work)
    state.metrics.scored(model.names[0], len(pairs))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return order[: body.top_n], scores, used
