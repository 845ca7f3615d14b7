"""M10: a client that goes away takes its work with it, streamed or not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from server.answers import ok
from server.harness import Live

from anycore.server.bridge import EngineClient

ENDLESS = {"model": "say", "prompt": "The quick brown fox", "max_tokens": 10_000, "cache_salt": "stuck"}


def engine(echo: Live) -> EngineClient:
    assert echo.server is not None
    return echo.server.clients[0]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def send(echo: Live, body: dict[str, Any]) -> socket.socket:
    """Send a request over a socket of our own, which the test closes as it likes."""
    host, port = urlsplit(echo.url).netloc.split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


SILENT = {"cache_salt": "silent"}  # as in a long queue, or during a long prompt: nothing has been sent yet


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True},
        {},
        {"n": 4},
        {"n": 4, "stream": True},
        {"prompt": ["a b", "c d"]},
        {**SILENT},
        {**SILENT, "stream": True},
        {**SILENT, "prompt": ["a b", "c d"], "stream": True},
    ],
)
def test_m10_work_ends_with_its_client(echo: Live, body: dict[str, Any]) -> None:
    client = engine(echo)
    aborted = client.stats.aborted
    connection = send(echo, {**ENDLESS, "max_tokens": 400, **body})
    until(lambda: client.live > 0 and client.stats.running > 0)
    if body.get("stream") and "cache_salt" not in body:
        received = b""
        while received.count(b"data: ") < 4:
            received += connection.recv(4096)
    connection.close()
    until(lambda: not client.live and not client.stats.running)
    assert client.stats.aborted > aborted  # it did not run to its end


def test_m10_fifty_in_a_row_leave_nothing_behind(echo: Live) -> None:
    client = engine(echo)
    for i in range(50):
        send(echo, {**ENDLESS, "max_tokens": 400, "stream": bool(i % 2)}).close()
    until(lambda: not client.live and not client.stats.running)
    said = ok(echo.post("/v1/completions", {"model": "say", "prompt": "still here", "max_tokens": 99}))
    assert said["choices"][0]["text"] == "still here"


def test_m10_neighbours_go_on(echo: Live) -> None:
    connection = send(echo, {**ENDLESS, "max_tokens": 400})
    until(lambda: engine(echo).live > 0)
    text = "one two three " * 10
    connection.close()
    said = ok(echo.post("/v1/completions", {"model": "say", "prompt": text, "max_tokens": 400}))
    assert said["choices"][0]["text"] == text
