"""Routes that say what is served here, and what the backends found on this machine could serve."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from anycore.answers import Model, Question
from anycore.ask import check
from anycore.capabilities import capabilities as describe
from anycore.contract.declare import Task
from anycore.errors import BadRequest, ConfigError, Unavailable
from anycore.server.failures import ERRORS
from anycore.server.operations import status_of
from anycore.server.scopes import ANY
from anycore.server.slot import NOT_CHECKED
from anycore.server.state import ServedModel, ServerState, named, state_of

router = APIRouter(tags=["models"], responses=ERRORS, dependencies=[ANY])
State = Annotated[ServerState, Depends(state_of)]


@router.get("/v1/models")
async def list_models(state: State) -> dict[str, Any]:
    """Every name a request may carry in `model`, with what it stands for."""
    entries = [_entry(state, model, name) for model in state.models for name in model.names]
    return {"object": "list", "data": entries}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, state: State) -> dict[str, Any]:
    return _entry(state, named(state, name), name)


@router.get("/v1/capabilities")
async def capabilities(
    state: State,
    model: str | None = None,
    task: Task | None = None,
    backend: str | None = None,
    chip: str | None = None,
    dtype: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
    features: str = "",
    max_model_len: int | None = None,
) -> dict[str, Any]:
    """The support table of every backend found; those without a device, and plugins that failed, with the reason.

    With `model`, one that is served here, also what `anycore check` says about it; the other parameters are its flags.
    """
    plugins = state.plugins
    if plugins is None:
        raise Unavailable("the plugins are still being loaded", code="model_starting")
    report = await asyncio.to_thread(describe, plugins)
    if model is not None:
        served = named(state, model)
        if served.remote:
            return {**report, "check": {"model": model, "remote": served.slot.config.url, "support": NOT_CHECKED}}
        source, spec = served.source, served.spec
        question = Question(
            model,
            task=task.value if task else "auto",
            backend=backend,
            chip=chip,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            features=tuple(name.strip() for name in features.split(",") if name.strip()),
            max_model_len=max_model_len,
        )
        try:
            found = await asyncio.to_thread(check, question, plugins, Model(source, spec))
        except ConfigError as error:
            raise BadRequest(error.message, param=error.param) from error
        report["check"] = found.as_dict()
    return report


def _entry(state: ServerState, model: ServedModel, name: str) -> dict[str, Any]:
    """Return the model's card under one of its names."""
    base = {"object": "model", "created": state.started, "owned_by": "anycore"}
    card = {**base, **model.card, "id": name, "root": model.names[0], **status_of(model)}
    if model.reading is not None and model.task is Task.GENERATE:
        card["sampling_defaults"] = model.sampling_defaults.values  # where they differ from the OpenAI API's
        card |= model.formats.described
    return card
