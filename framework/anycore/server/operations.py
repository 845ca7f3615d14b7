"""Routes for operators: live, ready, version, load, metrics."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from anycore import __version__
from anycore.errors import Unavailable
from anycore.server.failures import ERRORS, RETRY_SECONDS
from anycore.server.metrics import CONTENT_TYPE
from anycore.server.phases import Phase
from anycore.server.scopes import ANY, METRICS
from anycore.server.state import ServedModel, ServerState, named, state_of

router = APIRouter(tags=["operations"], responses=ERRORS)
State = Annotated[ServerState, Depends(state_of)]


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def health(state: State) -> Response:
    """Whether the process should be left alone: 200 also while it loads, restarts an engine, is busy or drains.

    503 once the server ends because an engine died."""
    return _report(state, bad=state.phase is Phase.DEAD)


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(state: State, model: str | None = None) -> Response:
    """Whether to send requests here: 200 when every model is ready or unloaded, else 503 with the phase of each.

    With `model`, whether to send requests for that one here.
    """
    if model is not None and not state.draining:
        return _report(state, bad=not named(state, model).ready)
    return _report(state, bad=not state.ready)


@router.get("/version", dependencies=[ANY])
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", response_class=Response, dependencies=[METRICS])
def metrics(state: State) -> Response:  # in a thread: it takes milliseconds
    """Prometheus text format."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/load", dependencies=[METRICS])
async def load(state: State) -> dict[str, Any]:
    """How much is under way: `server_load` counts the requests to models that this front has, as vLLM's does, and each
    model's figures are its engines' last, of all fronts."""
    models = [load_of(model) for model in state.models]
    return {"server_load": sum(model.slot.live for model in state.models), "models": models}


_CODES = {Phase.DEAD: "engine_dead", Phase.DRAINING: "shutting_down"}


def _report(state: ServerState, bad: bool) -> Response:
    """Return the phase of the server and of each model; a 503 also carries the error envelope."""
    phase = state.phase
    models = [{"id": model.names[0], **status_of(model)} for model in state.models]
    body: dict[str, Any] = {"status": phase.value, "models": models}
    headers = {"Cache-Control": "no-store"}
    if bad:
        error = Unavailable(f"the server is not ready: {phase.value}", code=_CODES.get(phase, f"model_{phase.value}"))
        body |= error.envelope()
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(body, status_code=503 if bad else 200, headers=headers)


def load_of(model: ServedModel) -> dict[str, Any]:
    """Return the sequences that run and wait in the engines of a model, and the fullest one's share of KV blocks."""
    stats = [engine.stats for engine in model.slot.engines]
    used = [1 - each.blocks_free / each.blocks for each in stats if each.blocks]
    entry: dict[str, Any] = {"id": model.names[0], "requests": model.slot.live}
    entry |= {"running": sum(each.running for each in stats), "waiting": sum(each.waiting for each in stats)}
    if used:
        entry["kv_cache_usage"] = round(max(used), 4)
    return entry


def status_of(model: ServedModel) -> dict[str, Any]:
    """Return the phase of a model, why it is in it and since when, and how far what is being loaded is."""
    status = model.slot.status
    seconds = round(max(0.0, time.monotonic() - status.since), 1)
    entry: dict[str, Any] = {"phase": status.phase.value, "code": status.code, "seconds": seconds}
    if len(model.slot.statuses) > 1:
        entry["engines"] = [{"phase": each.phase.value, "code": each.code} for each in model.slot.statuses]
    if status.reason:
        entry["reason"] = status.reason
    if status.activity:
        entry |= {"activity": status.activity, "percent": round(100 * status.fraction)}
    return entry
