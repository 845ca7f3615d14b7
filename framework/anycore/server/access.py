"""The outermost layer under HTTP: begins a visit, writes its id into the answer, and at its end counts and logs it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anycore.server import visits
from anycore.server.auth import OPEN_ROUTES
from anycore.server.metrics import Metrics
from anycore.server.visits import Visit

if TYPE_CHECKING:
    from anycore.server.tracing import Tracer

QUIET = OPEN_ROUTES | {"/metrics", "/load"}
"""Paths that are asked for every few seconds: they are neither counted nor, above debug, logged."""

log = logging.getLogger("anycore.access")


class Access:
    """ASGI middleware around all the others."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "://" in scope["path"]:  # as to a proxy; HTTP wants it taken for the path alone (RFC 9112, 3.2.2)
            scope["path"] = urlsplit(scope["path"]).path or "/"
        headers = dict(scope["headers"])
        is_probe = scope["path"] in OPEN_ROUTES
        visit = Visit("" if is_probe else request_id_of(headers), scope["method"], scope["path"])
        visits.begin(visit)
        scope.setdefault("state", {})["request_id"] = visit.id

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                if not is_probe:
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", visit.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, reply)
        finally:
            route = scope.get("route")
            visit.route = getattr(route, "path", "none")
            key = scope["state"].get("key")
            visit.key = getattr(key, "name", "")
            self._end(visit, headers)

    def _end(self, visit: Visit, headers: Mapping[bytes, bytes]) -> None:
        seconds = visit.seconds
        quiet = visit.path in QUIET
        if not quiet:
            self._metrics.http(visit.route, visit.method, visit.status, seconds)
        if visit.error:
            self._metrics.refused(visit.error, visit.key)
        if self._tracer is not None:
            self._tracer.trace(visit, headers)
        level = logging.DEBUG if quiet else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", line_of(visit, seconds), extra={"fields": fields_of(visit, seconds)})


def line_of(visit: Visit, seconds: float) -> str:
    """Write a visit for people."""
    path = visit.path[:200].encode("unicode_escape").decode()  # a line break in it would begin a line of its own
    parts = [f"{visit.method} {path} {visit.status} {seconds:.3f} s"]
    if visit.requests:
        parts.append(f"{visit.model} {visit.prompt_tokens}+{visit.output_tokens} tokens")
    return " ".join((*parts, *filter(None, (visit.error, visit.key))))


def fields_of(visit: Visit, seconds: float) -> dict[str, str | int | float]:
    """Write a visit for programs."""
    fields: dict[str, str | int | float] = {
        "method": visit.method,
        "path": visit.path[:200],
        "route": visit.route,
        "status": visit.status,
        "seconds": round(seconds, 6),
        "error": visit.error,
        "key": visit.key,
    }
    if visit.requests:
        fields |= {
            "model": visit.model,
            "prompt_tokens": visit.prompt_tokens,
            "cached_tokens": visit.cached_tokens,
            "output_tokens": visit.output_tokens,
        }
    return fields


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's x-request-id if it is short and printable, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if re.fullmatch(r"[A-Za-z0-9._:/+=-]{1,128}", given) else uuid4().hex
