"""Reads request bodies faster and more strictly than the standard library: no NaN, no lone surrogates."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute


class JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from None  # what FastAPI looks for


class JsonRoute(APIRoute):
    """The `route_class` of routers whose bodies may be megabytes: the event loop waits while a body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
