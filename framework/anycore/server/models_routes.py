"""Routes that say what is served here, and what the backends found on this machine could serve."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from anycore.capabilities import capabilities as describe
from anycore.contract.declare import Task
from anycore.errors import ModelNotFound, Unavailable
from anycore.server.failures import ERRORS
from anycore.server.state import MAX_NAME, ServedModel, ServerState, state_of

router = APIRouter(tags=["models"], responses=ERRORS)
State = Annotated[ServerState, Depends(state_of)]


@router.get("/v1/models")
async def list_models(state: State) -> dict[str, Any]:
    """Every name a request may carry in `model`, with what it stands for."""
    entries = [_entry(state, model, name) for model in state.models for name in model.names]
    return {"object": "list", "data": entries}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, state: State) -> dict[str, Any]:
    for model in state.models:
        if name in model.names:
            return _entry(state, model, name)
    served = ", ".join(name for model in state.models for name in model.names)
    raise ModelNotFound(f"there is no model {name[:MAX_NAME]!r} here; served: {served}", param="model")


@router.get("/v1/capabilities")
async def capabilities(state: State) -> dict[str, Any]:
    """The support table of every backend found; those without a device, and plugins that failed, with the reason."""
    plugins = state.plugins
    if plugins is None:
        raise Unavailable("the plugins are still being loaded", code="model_starting")
    return await asyncio.to_thread(describe, plugins)


def _entry(state: ServerState, model: ServedModel, name: str) -> dict[str, Any]:
    """Return the model's card under one of its names."""
    base = {"object": "model", "created": state.started, "owned_by": "anycore"}
    card = {**base, **model.card, "id": name, "root": model.names[0], "phase": model.client.phase.value}
    if model.card and model.task is Task.GENERATE:
        card["sampling_defaults"] = model.sampling_defaults.values  # where they differ from the OpenAI API's
    return card
