"""Routes that change what is loaded: weights replaced, models unloaded, brought back and moved while the server lives.

Each answers when the change is done, with the model's entry of `/ready`. One change a model at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from anycore.errors import BadRequest, ConfigError
from anycore.server.failures import ERRORS
from anycore.server.operations import status_of
from anycore.server.scopes import ADMIN
from anycore.server.state import ServedModel, ServerState, named, state_of

router = APIRouter(tags=["administration"], responses=ERRORS, dependencies=[ADMIN])
State = Annotated[ServerState, Depends(state_of)]


class Reload(BaseModel):
    model_config = ConfigDict(extra="forbid")

    checkpoint: str | None = Field(None, description="folder with other weights of the same shape", max_length=4096)


class Move(BaseModel):
    model_config = ConfigDict(extra="forbid")

    backend: str = Field(description="as --backend", max_length=64)
    device: int = Field(0, description="as --device", ge=0)
    devices: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="as --devices, for a model with several replicas", max_length=1024
    )


@router.post("/v1/models/{name:path}/reload")
async def reload(name: str, state: State, body: Reload | None = None) -> dict[str, Any]:
    """Read the weights anew, or those of another folder, beside the ones in use if both fit, and switch to them.

    No request is dropped. Where the new ones cannot be served, the answer says why and the old ones stay.
    """
    model = named(state, name)
    return await _done(model, model.slot.reload(body.checkpoint if body else None))


@router.post("/v1/models/{name:path}/unload")
async def unload(name: str, state: State) -> dict[str, Any]:
    """Finish what runs and free all that the model takes, until it is loaded again by `load`."""
    model = named(state, name)
    return await _done(model, model.slot.unload())


@router.post("/v1/models/{name:path}/load")
async def load(name: str, state: State) -> dict[str, Any]:
    """Load a model that was unloaded, or whose restart waits."""
    model = named(state, name)
    return await _done(model, model.slot.bring_back())


@router.post("/v1/models/{name:path}/move")
async def move(name: str, body: Move, state: State) -> dict[str, Any]:
    """Load the model on another backend or device, switch to it, and free the one before. Fails as `reload` does."""
    model = named(state, name)
    return await _done(model, model.slot.move(body.backend, tuple(body.devices) or (body.device,)))


async def _done(model: ServedModel, change: Awaitable[None]) -> dict[str, Any]:
    """Wait for a change. What the settings of a command line would be refused for is a bad request here."""
    try:
        await change
    except ConfigError as error:
        raise BadRequest(error.message, param=error.param, code=error.code) from error
    return {"id": model.names[0], **status_of(model)}
