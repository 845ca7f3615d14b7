"""What is refused before a route: limits, types, malformed HTTP; and what errors look like."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from server.fake_child import scripted
from server.harness import Live, patience, serve_here
from starlette.types import Message

from anycore.config import ModelConfig
from anycore.errors import BadRequest
from anycore.server.auth import Guard
from anycore.server.failures import add_handlers, field_of
from anycore.server.gate import MAX_DEPTH, MAX_HEADERS, Gate, check_depth
from anycore.server.logs import MaskingFormatter

LIMIT = 20_000


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    with serve_here(model, launch=scripted(str(t_lm)), max_body_size=LIMIT) as live:
        yield live


def raw(live: Live, data: bytes) -> bytes:
    """Send bytes and return all that comes back."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def check(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == code
    return error


def alive(live: Live) -> None:
    assert live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 4}).status_code == 200


def test_a11_a_whole_url_is_taken_for_its_path(live: Live) -> None:
    """Clients that take the server for a proxy write one; HTTP/1.1 wants it understood."""
    with httpx.Client(proxy=live.url) as client:
        assert client.get("http://elsewhere.invalid/health").status_code == 200
        body = {"model": "lm", "prompt": "a", "max_tokens": 4}
        assert client.post("http://elsewhere.invalid/v1/completions?x=1", json=body).status_code == 200
        assert client.get("http://elsewhere.invalid/v1/nothing").status_code == 404


def test_a11_routing_errors(live: Live) -> None:
    assert "GET /v1/nothing" in check(live.get("/v1/nothing"), 404, "not_found")["message"]
    response = live.get("/v1/completions")
    assert "POST" in check(response, 405, "method_not_allowed")["message"]
    assert response.headers["allow"] == "POST"
    check(live.get("/health/"), 404, "not_found")
    check(httpx.options(live.url + "/v1/models", verify=False), 405, "method_not_allowed")
    check(live.get("/v1/" + "x" * 5000), 404, "not_found")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/v1/v1/completions", "/v1/completions"),
        ("/completions", "/v1/completions"),
        ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/embeddings", "/v1/embeddings"),
        ("/rerank/", "/rerank"),
        ("/v1/health", "/health"),
        ("/v1/responses/", "/v1/responses"),
    ],
)
def test_o09_a_route_that_is_nearly_right_is_told_the_right_one(live: Live, asked: str, meant: str) -> None:
    said = check(live.post(asked, {}), 404, "not_found")["message"]
    assert f"but there is {meant}: is the base URL right?" in said


def test_a11_bodies_that_are_not_json(live: Live) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = live.post("/v1/completions", content=b"prompt=a", headers={"content-type": kind})
        check(response, 415, "unsupported_media_type")
    json_type = {"content-type": "application/json; charset=utf-8"}
    for body in (b'{"model": ', b"nonsense", b"{}}", b'{"a": "\xff"}', b"[" * 90, b"\x00"):
        check(live.post("/v1/completions", content=body, headers=json_type), 400, "invalid_json")
    for body in (b"", b"[]", b"null"):
        error = check(live.post("/v1/completions", content=body, headers=json_type), 400, "invalid_json")
        assert error["message"] == "the body must be a JSON object"
    packed = live.post("/v1/completions", content=b"\x1f\x8b", headers={**json_type, "content-encoding": "gzip"})
    assert "content-encoding gzip" in check(packed, 415, "unsupported_media_type")["message"]
    alive(live)


def test_o02_a_body_over_the_limit_is_refused_unread(live: Live) -> None:
    large = {"model": "lm", "prompt": "a" * LIMIT}
    assert str(LIMIT) in check(live.post("/v1/completions", large), 413, "request_too_large")["message"]

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(40):
            yield b"a" * 1000

    headers = {"content-type": "application/json"}
    check(live.post("/v1/completions", content=parts(), headers=headers), 413, "request_too_large")
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"host: x",
        b"content-type: application/json",
        b"content-length: 99999999999",
        b"connection: close",
    )
    started = time.monotonic()
    assert b" 413 " in raw(live, b"\r\n".join(lines) + b"\r\n\r\n")
    assert time.monotonic() - started < 2 * patience()
    alive(live)


def test_o02_nesting_and_headers(live: Live) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"[" * 9000 + b"]" * 9000, b'{"a":' * 3000 + b"1" + b"}" * 3000):
        check(live.post("/v1/completions", content=body, headers=headers), 400, "nested_too_deeply")
    many = {f"x-{i}": "1" for i in range(1000)}
    check(live.get("/v1/models", headers=many), 431, "headers_too_large")
    for data in (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 68_000, b"nonsense\r\n\r\n", b"\x16\x03\x01" * 50):
        head, _, body = raw(live, data).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    alive(live)


def test_o02_limits_are_met_exactly(live: Live) -> None:
    sent = len(httpx.Request("GET", live.url).headers) + 4  # accept, accept-encoding, connection, user-agent
    fits = {f"x-{i}": "1" for i in range(MAX_HEADERS - sent)}
    assert live.get("/v1/models", headers=fits).status_code == 200
    check(live.get("/v1/models", headers={**fits, "x-more": "1"}), 431, "headers_too_large")
    for size, status in ((LIMIT, 200), (LIMIT + 1, 413)):
        body = b'{"model": "lm", "prompt": [7], "max_tokens": 1}'
        body += b" " * (size - len(body))
        response = live.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status, response.text


def test_depth_counts_brackets_outside_strings() -> None:
    deep = MAX_DEPTH * b"[" + MAX_DEPTH * b"]"
    fine = [
        deep,
        b'"' + b"[" * 500 + b'"',
        b'{"a\\"[[": "' + b"{" * 500 + b'\\\\"}',
        b"[" + b",".join([b"{}"] * 500) + b"]",
        b'["' + b"[" * 500,  # cut off within a string: the parser's business
        b"[" * 50 + b"}" * 60,
    ]
    for body in fine:
        check_depth(body)
    for body in (b"[" + deep + b"]", b"[" * 100_000 + b"]" * 100_000, b'[{"a":' * 60 + b"1" + b"}]" * 60):
        with pytest.raises(BadRequest):
            check_depth(body)


@pytest.mark.parametrize("body", [b'"\\' * 2_000_000, b"[]" * 2_000_000, b'["' + b'\\"' * 2_000_000, b'"' * 4_000_001])
def test_depth_is_checked_in_linear_time(body: bytes) -> None:
    started = time.monotonic()
    check_depth(b"[" * (MAX_DEPTH + 1) + body)
    assert time.monotonic() - started < 3 * patience()


def test_request_ids_are_echoed_or_made(live: Live) -> None:
    given = live.get("/v1/models", headers={"x-request-id": "abc-1.2:3"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    bad = ("", "a b", "x" * 200)
    made = {live.get("/v1/models", headers={"x-request-id": i}).headers["x-request-id"] for i in bad}
    assert len(made) == 3
    assert all(len(i) == 32 for i in made)
    assert live.get("/v1/nothing").headers["x-request-id"]


def test_a11_a_fault_of_ours_is_a_500_without_its_insides(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    add_handlers(app)
    app.add_middleware(Gate, guard=Guard([]), max_body=1000)
    secret = "the user's " + "prompt"

    @app.get("/fails")
    async def fails() -> None:
        raise KeyError(secret)

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/fails")

    with caplog.at_level(logging.INFO):
        response = asyncio.run(get())
    check(response, 500, "internal_error")
    assert "KeyError" not in response.text
    assert secret not in response.text
    assert "KeyError" in caplog.text  # the operator learns what and where, not the text
    assert secret not in caplog.text


def test_a_client_that_goes_while_sending_its_body_disturbs_nobody() -> None:
    seen: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Gate(app, Guard([]), 1000)(scope, receive, send))
    assert seen == [{"type": "http.disconnect"}]


def test_fields_are_written_as_openai_does() -> None:
    assert field_of(("body", "messages", 0, "user", "content")) == "messages[0].user.content"
    assert field_of(("body", "input", "list[str]", 3)) == "input[3]"
    assert field_of(("body",)) is None


def test_o06_the_log_masks_secrets_also_in_tracebacks() -> None:
    secret = "sk-" + "1"
    formatter = MaskingFormatter([secret, secret + "-long"], loud=True)
    try:
        raise ValueError(f"with {secret}-long inside")
    except ValueError as error:
        failure = (ValueError, error, error.__traceback__)
    text = formatter.format(logging.LogRecord("x", logging.ERROR, "", 0, "api_key=%s", (secret,), failure))
    assert "api_key=***" in text
    assert "ValueError: with *** inside" in text
    assert secret not in text
