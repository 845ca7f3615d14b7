"""Server-sent events, and what to do when the client goes away: stop the work, for streamed and whole replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from anycore.errors import AnycoreError
from anycore.server import visits
from anycore.server.logs import log_crash

T = TypeVar("T")
log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class ClientGone(AnycoreError):
    """The client closed the connection; nobody reads the answer."""

    status = 499
    type = "client_error"
    code = "client_closed_request"


def event(payload: Any) -> bytes:
    """Write one event."""
    return b"data: " + encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """Write one event that has a name."""
    return b"event: " + name.encode() + b"\n" + event(payload)


def failed_event(error: AnycoreError) -> bytes:
    """The last event of a stream that cannot go on."""
    return event(error.envelope())


def json_response(payload: Any) -> Response:
    return Response(encode(payload), media_type="application/json")


class EventStream(StreamingResponse):
    """Sends events as they come. An error becomes a last event; when the client goes away, the iterator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], failed: Callable[[AnycoreError], bytes] = failed_event) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientGone):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(cast(Any, self._events)) as events:
            try:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except AnycoreError as error:
                visits.failed(error)
                await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
            except Exception as error:
                log_crash(log, "a stream failed", error)
                failed = AnycoreError("the server failed; its log says where")
                visits.failed(failed)
                await send({"type": "http.response.body", "body": self._failed(failed), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def first_of(request: Request, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wait for the first item, so that an early error is an ordinary HTTP answer; return an iterator over all."""
    try:
        first = await unless_gone(request.receive, cast(Coroutine[Any, Any, T], anext(items)))
    except BaseException:
        await cast(Any, items).aclose()
        raise
    return _chain(first, items)


async def _chain(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    async with aclosing(cast(Any, rest)) as items:
        yield first
        async for item in items:
            yield item


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it when the client closes the connection.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client closed the connection")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
