"""POST /rerank, /v1/rerank (Jina's and Cohere's first shape) and /v2/rerank (Cohere's second)."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, reply_id
from anycore.server.protocol import responses
from anycore.server.protocol_pool import Rerank, RerankBody, RerankResult
from anycore.server.rank import scores_of
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone

router = APIRouter(tags=["rerank"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/rerank", response_model=None, responses=responses(Rerank))
@router.post("/v1/rerank", response_model=None, responses=responses(Rerank))
@router.post("/v2/rerank", response_model=None, responses=responses(Rerank))
async def rerank(request: Request, body: RerankBody, state: State, caller: Caller) -> Response:
    """Sort documents by relevance to a query, the best first; equal scores keep the order of the request."""
    model = admit(state, body, body.model, Task.RERANK)
    names = (["query"], [f"documents[{i}]" for i in range(len(body.documents))])
    pairs = [(0, i) for i in range(len(body.documents))]
    work = scores_of(model, [body.query], body.documents, pairs, names, body, caller, state.config.log_prompts)
    scores, used = await unless_gone(request.receive, work)
    state.metrics.scored(model.names[0], len(pairs))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    reply: Rerank = {
        "id": f"rerank-{reply_id(request, body.request_id)}",
        "model": body.model or model.names[0],
        "results": [_result(i, scores[i], body) for i in order[: body.top_n]],
        "usage": used,
    }
    if request.url.path == "/v2/rerank":
        reply["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return json_response(reply)


def _result(index: int, score: float, body: RerankBody) -> RerankResult:
    result: RerankResult = {"index": index, "relevance_score": score}
    if body.return_documents:
        result["document"] = {"text": body.documents[index]}
    return result
