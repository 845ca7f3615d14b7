"""The layer before all routes: key, limits on headers and body and their time, and the net under the routes.

What is refused here costs nothing further in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anycore.errors import AnycoreError, BadRequest, TooLarge
from anycore.server import visits
from anycore.server.accounts import Account
from anycore.server.auth import Guard
from anycore.server.failures import error_response
from anycore.server.logs import log_crash
from anycore.server.slow import LEAST, Watch

MAX_HEADERS = 100
MAX_DEPTH = 100  # of a JSON body
REFUSALS = (429, 503)  # answers to what was not computed

log = logging.getLogger(__name__)


class HeadersTooLarge(BadRequest):
    status = 431
    code = "headers_too_large"


class NotJson(BadRequest):
    status = 415
    code = "unsupported_media_type"


class SlowRequest(BadRequest):
    status = 408
    code = "request_timeout"


class Gate:
    """ASGI middleware, inside of `access.Access`."""

    def __init__(self, app: ASGIApp, guard: Guard, max_body: int, read_timeout: float = 0.0) -> None:
        self._app = app
        self._guard = guard
        self._max_body = max_body
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        visit = visits.current()
        account: Account | None = None
        try:
            check_headers(scope["headers"])
            account = self._guard.admit(scope["path"], authorization_of(headers))
            scope.setdefault("state", {}).update(account=account, key=account.key)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await read_body(headers, receive, self._max_body, self._read_timeout)
            await self._app(scope, receive, send)
        except (SlowRequest, TooLarge) as error:  # the rest of the body is not read
            await error_response(error, {"Connection": "close"})(scope, receive, send)
        except AnycoreError as error:
            await error_response(error)(scope, receive, send)
        except Exception as error:
            log_crash(log, f"{scope['method']} {scope['path'][:200]} failed", error)
            if visit is None or not visit.status:
                await error_response(AnycoreError("the server failed on this request"))(scope, receive, send)
        finally:
            if account is not None:
                account.close(refused=visit is not None and visit.status in REFUSALS)


def authorization_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the header of that name, or what Anthropic's clients send in its place."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization") or (None if key is None else b"Bearer " + key)


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse more headers than any honest client sends (their total size is limited while they are read)."""
    number = len(list(headers))
    if number > MAX_HEADERS:
        raise HeadersTooLarge(f"{number} headers; at most {MAX_HEADERS} are read")


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int, seconds: float) -> Receive:
    """Read the body within its limits, check its type and depth, and return a `receive` that hands it on.

    Args:
        limit: in bytes.
        seconds: in which LEAST bytes of it must come, or the rest; 0: no limit.

    Raises:
        TooLarge: over the limit, seen from the content-length where there is one.
        SlowRequest: too little came in time.
        NotJson: a body of another type.
        BadRequest: nested too deeply.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"the body has {int(declared)} bytes, at most {limit} are read (--max-body-size)")
    chunks: list[bytes] = []
    size = 0
    more = True
    clock = asyncio.get_running_loop().time
    watch = Watch(seconds, clock())
    while more:
        try:
            message = await asyncio.wait_for(receive(), watch.left(clock()) if seconds else None)
        except asyncio.TimeoutError:
            raise SlowRequest(
                f"fewer than {LEAST} bytes of the body came within {seconds:g} s (--read-timeout)"
            ) from None
        if message["type"] == "http.disconnect":
            return _replay(message, receive)
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
        watch.passed(size, clock())
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes (--max-body-size)")
    body = b"".join(chunks)
    if body:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            name = kind.decode("latin-1")[:100] or "missing"
            raise NotJson(f"the content type must be application/json, not {name}")
        packed = headers.get(b"content-encoding", b"identity").strip().lower()
        if packed != b"identity":
            name = packed[:100].decode("latin-1")
            raise NotJson(f"compressed bodies are not read: leave content-encoding {name} out")
        check_depth(body)
    return _replay({"type": "http.request", "body": body, "more_body": False}, receive)


def _replay(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that gives `first` once, then what comes after it (the client's disconnect)."""
    left = [first]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


# A string, or one that the end of the body cuts off: every quote starts a match, so the search is linear.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")


def check_depth(body: bytes) -> None:
    """Refuse a body nested deeper than MAX_DEPTH, before any parser recurses into it.

    Innermost pairs are removed once per level, so the cost is a few passes in C over the brackets.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(_TO_SQUARE, _ALL_BUT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        try:
            json.loads(body)
        except ValueError:
            return  # not balanced at all: the route says where
        except RecursionError:
            pass
        raise BadRequest(f"the body is nested deeper than {MAX_DEPTH} levels", code="nested_too_deeply")
