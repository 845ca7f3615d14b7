"""What every route does before its own work: find the model, refuse fields that cannot be honoured, keep time."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Header, Request

from anycore.contract.declare import Task
from anycore.engine.request import NewRequest
from anycore.errors import BadRequest, DeadlineExceeded, Unsupported
from anycore.server.accounts import Account
from anycore.server.named import check_name
from anycore.server.protocol import Body
from anycore.server.protocol_generate import IGNORED, OF_OTHERS, UNSUPPORTED
from anycore.server.state import ServedModel, ServerState, resolve_model, state_of

T = TypeVar("T")
State = Annotated[ServerState, Depends(state_of)]
log = logging.getLogger(__name__)

SHORT = 4096  # characters that are tokenised at once; longer text is taken off the event loop


def check_fields(state: ServerState, body: Body) -> None:
    """Look at the fields that are not in the schema.

    Raises:
        Unsupported: a field that means something here and is not built.
        BadRequest: a field under the name of another API; any unknown one, under --strict, otherwise it is counted and
            logged.
    """
    unknown: list[str] = []
    refused = UNSUPPORTED if body.only_counts else UNSUPPORTED | OF_OTHERS
    for name, value in (body.model_extra or {}).items():
        check_name(body, name)
        if name in refused:
            if value not in ("", [], {}) and value not in refused[name]:
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


def here(model: ServedModel) -> ServedModel:
    """Return the model if it runs here.

    Raises:
        Unsupported: another server answers for it, and this form of request is not passed on.
    """
    if model.remote:
        raise Unsupported(
            f"model {model.names[0]} is answered by another server: ask it by /v1/chat/completions", param="model"
        )
    return model


async def offload(size: int, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call `function`; in a thread when `size`, the characters it has to read, is large."""
    if size <= SHORT:
        return function(*args, **options)
    return await asyncio.to_thread(function, *args, **options)


@dataclass(frozen=True, slots=True)
class Call:
    """What a request brings beside its body: at whose expense it runs, and until when."""

    account: Account
    arrived: float
    seconds: float | None = None  # of x-request-timeout

    def in_time(self, request: NewRequest, model: ServedModel) -> NewRequest:
        """Return an engine request with the seconds that are left to it, by the header and by --request-timeout.

        Raises:
            DeadlineExceeded: none are left.
        """
        limits = [s for s in (self.seconds, model.slot.config.request_timeout) if s is not None]
        if not limits:
            return request
        waited = time.monotonic() - self.arrived
        left = min(limits) - waited
        if left <= 0:
            raise DeadlineExceeded(f"given up after {waited:.1f} s, before the engine had it")
        return msgspec.structs.replace(request, deadline=left)


async def caller_of(
    request: Request,
    x_request_timeout: Annotated[
        str | None, Header(description="seconds from arrival until the request is given up with 504")
    ] = None,
) -> Call:
    """Count the request at the expense of its key, and read the header `x-request-timeout`.

    Raises:
        RateLimited: the key has used up what it may.
        BadRequest: the header is not a number of seconds above 0.
    """
    account: Account = request.state.account
    account.open()
    arrived = time.monotonic()
    if x_request_timeout is None:
        return Call(account, arrived)
    try:
        seconds = float(x_request_timeout)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(
            f"header x-request-timeout must be seconds above 0, not {x_request_timeout[:40]!r}",
            param="x-request-timeout",
        )
    return Call(account, arrived, seconds)


Caller = Annotated[Call, Depends(caller_of)]


def reply_id(request: Request, wanted: str | None) -> str:
    """Return what identifies an answer: the body's request_id, else the id of the HTTP request (x-request-id)."""
    return wanted or str(request.state.request_id)
