"""Whatever goes wrong leaves as the OpenAI error envelope: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from anycore.errors import AnycoreError, BadRequest, NotFound, Overloaded, Unauthorized, Unavailable
from anycore.server import visits
from anycore.server.protocol import ErrorEnvelope

RETRY_SECONDS = 1  # Retry-After while loading or draining
MESSAGES = "/v1/messages"  # whose clients look for the type of an error's body, too
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorEnvelope, "description": "The request is wrong"},
    "5XX": {"model": ErrorEnvelope, "description": "The server cannot answer now"},
}
"""What the OpenAPI document says about the errors of a route."""


class WrongMethod(BadRequest):
    status = 405
    code = "method_not_allowed"


MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""What Anthropic's API calls errors, by status; below 500 all others are invalid requests, from there on its own."""


def messages_envelope(error: AnycoreError) -> dict[str, Any]:
    """An error in the form of Anthropic's API."""
    body: dict[str, Any] = error.envelope()
    kind = MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {**body["error"], "type": kind}}


def error_response(error: AnycoreError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the response of an error, with the headers its kind calls for."""
    visits.failed(error)
    extra = dict(headers or {})
    if isinstance(error, Overloaded):
        extra["Retry-After"] = str(error.retry_after)
    elif isinstance(error, Unavailable):
        extra["Retry-After"] = str(RETRY_SECONDS)
    elif isinstance(error, Unauthorized):
        extra["WWW-Authenticate"] = "Bearer"
    visit = visits.current()
    asked_by_messages = visit is not None and visit.path.startswith(MESSAGES)
    body = messages_envelope(error) if asked_by_messages else error.envelope()
    return JSONResponse(body, status_code=error.status, headers=extra)


def add_handlers(app: FastAPI) -> None:
    """Turn every exception a route may raise into the envelope; what is left over reaches `Gate`."""

    async def deliberate(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AnycoreError)
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(routing_error(request, error), error.headers)

    app.add_exception_handler(AnycoreError, deliberate)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def routing_error(request: Request, error: HTTPException) -> AnycoreError:
    """Say what is wrong with a request that no route took."""
    asked = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        near = nearest(request.url.path, getattr(request.app.state, "paths", ()))
        if near is not None:
            return NotFound(f"there is no route {asked}, but there is {near}: is the base URL right?")
        return NotFound(f"there is no route {asked}; /docs lists the routes")
    if error.status_code == 405:
        return WrongMethod(f"{asked} is not allowed; allowed: {(error.headers or {}).get('Allow', 'see /docs')}")
    if error.status_code < 500:
        plain = BadRequest("the body cannot be read: it must be JSON in UTF-8", code="invalid_json")
        plain.status = error.status_code
        return plain
    return AnycoreError("the server failed on this request")


def nearest(path: str, known: Iterable[str]) -> str | None:
    """Return the route that was meant, where a client put too much before it, or a slash behind it, or left /v1 out."""
    path = path.rstrip("/")
    meant = [each for each in known if path.endswith(each) or each == f"/v1{path}"]
    return max(meant, key=lambda each: (each == path, len(each)), default=None)


def validation_error(errors: Sequence[Any]) -> BadRequest:
    """Make one error of pydantic's list: the first field at fault, and all that is said about it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    field = field_of(first["loc"])
    said = [_text(e) for e in errors if field_of(e["loc"]) == field]
    message = "; ".join(dict.fromkeys(said))
    missing = first["type"] == "missing"
    code = "missing_required_parameter" if missing else "invalid_value"
    if field is None and first["type"] in ("missing", "model_attributes_type"):
        return BadRequest("the body must be a JSON object", code="invalid_json")
    return BadRequest(f"{field}: {message}" if field else message, param=field, code=code)


def field_of(loc: Sequence[int | str]) -> str | None:
    """Write a pydantic location as OpenAI does, `messages[0].content`; names of union members are left out."""
    out = ""
    for part in loc[1:]:  # loc[0] is "body", "query" or "path"
        if isinstance(part, int):
            out += f"[{part}]"
        elif re.fullmatch(r"[a-z][a-z0-9_]*", part) and part not in _TYPES:
            out += f".{part}" if out else part
    return out or None


_TYPES = frozenset({"str", "int", "float", "bool", "dict", "list", "tuple", "bytes", "none", "nullable", "union"})


def _text(error: Any) -> str:
    """Return pydantic's sentence without its prefix; it never quotes the input."""
    message: str = error["msg"]
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
