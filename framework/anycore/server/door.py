"""What every route does before its own work: find the model, refuse fields that cannot be honoured, keep time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request

from anycore.contract.declare import Task
from anycore.errors import BadRequest, Unsupported
from anycore.server.protocol import Body
from anycore.server.protocol_generate import IGNORED, UNSUPPORTED
from anycore.server.state import ServedModel, ServerState, resolve_model, state_of

T = TypeVar("T")
State = Annotated[ServerState, Depends(state_of)]
log = logging.getLogger(__name__)

SHORT = 4096  # characters that are tokenised at once; longer text is taken off the event loop


def check_fields(state: ServerState, body: Body) -> None:
    """Look at the fields that are not in the schema.

    Raises:
        Unsupported: a field that means something here and is not built.
        BadRequest: an unknown field, under --strict; otherwise it is counted and logged.
    """
    unknown: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if name in UNSUPPORTED:
            if value not in ("", [], {}) and value not in UNSUPPORTED[name]:
                raise Unsupported(f"{name} is not supported by this server", param=name)
        elif name not in IGNORED:
            unknown.append(name)
    if unknown and state.config.strict:
        raise BadRequest(
            f"unknown field {unknown[0]!r} (the server runs with --strict)", param=unknown[0], code="unknown_field"
        )
    if unknown:
        state.metrics.unknown_fields.inc(len(unknown))
        names = ", ".join(repr(name[:40]) for name in unknown[:8])
        log.warning("request fields that nothing here reads: %s", names)


def admit(state: ServerState, body: Body, name: str | None, *tasks: Task) -> ServedModel:
    """Check a body's further fields, then find the model it is for."""
    model = resolve_model(state, name, *tasks)
    check_fields(state, body)
    return model


async def offload(size: int, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call `function`; in a thread when `size`, the characters it has to read, is large."""
    if size <= SHORT:
        return function(*args, **options)
    return await asyncio.to_thread(function, *args, **options)


async def deadline_of(
    x_request_timeout: Annotated[
        str | None, Header(description="seconds from arrival in the engine until the request is given up with 504")
    ] = None,
) -> float | None:
    """Read the header `x-request-timeout`.

    Raises:
        BadRequest: it is not a number of seconds above 0.
    """
    if x_request_timeout is None:
        return None
    try:
        seconds = float(x_request_timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(
            f"header x-request-timeout must be seconds above 0, not {x_request_timeout[:40]!r}",
            param="x-request-timeout",
        )
    return seconds


Deadline = Annotated[float | None, Depends(deadline_of)]


def reply_id(request: Request, wanted: str | None) -> str:
    """Return what identifies an answer: the body's request_id, else the id of the HTTP request (x-request-id)."""
    return wanted or str(request.state.request_id)
