"""Routes for operators: live, ready, version, metrics."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from anycore import __version__
from anycore.errors import Unavailable
from anycore.server.failures import ERRORS, RETRY_SECONDS
from anycore.server.metrics import CONTENT_TYPE
from anycore.server.state import ServedModel, ServerState, state_of

router = APIRouter(tags=["operations"], responses=ERRORS)
State = Annotated[ServerState, Depends(state_of)]


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def health(state: State) -> Response:
    """Whether the process should be left alone: 200 also while it loads, is busy or drains; 503 once an engine died."""
    return _report(state, bad=state.phase == "dead")


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(state: State) -> Response:
    """Whether to send requests here: 200 when every model is ready, else 503 with the phase of each."""
    return _report(state, bad=state.phase != "ready")


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(state: State) -> Response:
    """Prometheus text format."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


_CODES = {"dead": "engine_dead", "draining": "shutting_down"}


def _report(state: ServerState, bad: bool) -> Response:
    """Return the phase of the server and of each model; a 503 also carries the error envelope."""
    phase = state.phase
    body: dict[str, Any] = {"status": phase, "models": [_model(model) for model in state.models]}
    headers = {"Cache-Control": "no-store"}
    if bad:
        error = Unavailable(f"the server is not ready: {phase}", code=_CODES.get(phase, f"model_{phase}"))
        body |= error.envelope()
        headers["Retry-After"] = str(RETRY_SECONDS)
    return JSONResponse(body, status_code=503 if bad else 200, headers=headers)


def _model(model: ServedModel) -> dict[str, Any]:
    client = model.client
    entry: dict[str, Any] = {"id": model.names[0], "phase": client.phase.value}
    if client.activity:
        entry |= {"activity": client.activity, "percent": round(100 * client.fraction)}
    if client.failure is not None:
        entry["reason"] = client.failure.message
    return entry
