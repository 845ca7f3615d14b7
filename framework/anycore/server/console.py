"""The web console: a page at `/` and its files under `/console/`, all of them parts of this package.

They hold nothing of this server, so they need no key. What they show comes from the API, whose routes do.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked for each time: another version has other files
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
PAGE = "index.html"


def routes() -> APIRouter:
    """Make a route for each file, which is read here, once."""
    router = APIRouter()
    for entry in files("anycore").joinpath("console").iterdir():
        path = "/" if entry.name == PAGE else f"/console/{entry.name}"
        router.add_route(path, File(entry.name, entry.read_bytes()).answer, include_in_schema=False)
    return router


class File:
    """One file, ready to be sent."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._headers = HEADERS | {"Content-Type": TYPES[name.rpartition(".")[2]], "ETag": etag}

    async def answer(self, request: Request) -> Response:
        """Send it, unless the browser has it."""
        known = request.headers.get("if-none-match", "")
        if self._headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)
