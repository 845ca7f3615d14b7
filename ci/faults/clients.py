"""Clients that misbehave: they leave, fall silent in the middle, or are slow. Each function is one of them, once."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from server.harness import Live

LIMIT = 2.0  # seconds: --read-timeout and --write-timeout of the servers here
LEAST = 16 * 2**10  # bytes that must pass within it
PATIENCE = 120.0

LONG = {"model": "lm", "prompt": "the river", "max_tokens": 400, "ignore_eos": True, "stream": True}
WIDE = LONG | {"max_tokens": 450, "logprobs": 20}
ENDLESS = LONG | {"max_tokens": 1500, "logprobs": 20}  # megabytes, more than is held for a client


def connect(live: Live, receive_buffer: int = 0) -> socket.socket:
    parts = urlsplit(live.url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect((parts.hostname, parts.port))
    return connection


def request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = "POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", "connection: close"
    return "\r\n".join((*lines, f"content-length: {len(content)}", "", "")).encode() + content


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection, in whatever way."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            received += part
    return received


def leave_stream(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(request(LONG))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def leave_before_the_answer(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(request(LONG | {"stream": False}))


def leave_in_the_prompt(live: Live) -> None:
    prompt = [7 + time.monotonic_ns() % 400] * 450  # not found in the prefix cache
    with connect(live) as connection:
        connection.sendall(request(LONG | {"prompt": prompt, "max_tokens": 40, "n": 4}))


def silent_in_the_headers(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(request(LONG)[:40])
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def silent_in_the_body(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(request(LONG)[:-5])
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def silent_in_the_answer(live: Live) -> None:
    """Asks, and takes nothing: as a peer that is gone without a word, of which no packet comes any more."""
    aborted = finished(live, "abort")
    with connect(live, receive_buffer=4096) as connection:
        connection.sendall(request(ENDLESS))
        live.wait(lambda: finished(live, "abort") > aborted, PATIENCE)
        assert not rest(connection).endswith(b"0\r\n\r\n"), "an answer that was cut off ends as if it were whole"


def slow_to_send(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(request(LONG)[:-60])
        for byte in request(LONG)[-60:]:
            if select.select([connection], [], [], LIMIT / 10)[0]:
                break
            connection.send(bytes([byte]))
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def slow_to_read(live: Live) -> None:
    """Takes a byte now and then: cut off."""
    aborted = finished(live, "abort")
    with connect(live, receive_buffer=4096) as connection:
        connection.sendall(request(ENDLESS))
        for _ in repeat(LIMIT / 20):
            connection.recv(1)
            if finished(live, "abort") > aborted:
                break
        assert not rest(connection).endswith(b"0\r\n\r\n")


def slow_but_steady(live: Live) -> None:
    """Takes more than is asked of it, but in pauses and little at once: gets all."""
    received = b""
    with connect(live, receive_buffer=4096) as connection:
        connection.sendall(request(WIDE))
        for _ in repeat(LIMIT / 8):
            end, got = time.monotonic() + LIMIT / 8, 0
            while got < 4 * LEAST and time.monotonic() < end and (part := connection.recv(2**14)):
                received, got = received + part, got + len(part)
            if received.endswith(b"0\r\n\r\n") or (not got and not part):
                break
    assert b"data: [DONE]" in received[-100:], received[-300:]


def repeat(seconds: float) -> Iterator[None]:
    """Every so many seconds, as long as patience lasts."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        yield
        time.sleep(seconds)
    raise AssertionError(f"not within {PATIENCE} s")


def finished(live: Live, reason: str) -> float:
    """Requests that ended so, as /metrics counts them."""
    found = re.findall(rf'^anycore:request_success_total{{.*finished_reason="{reason}".*}} (\S+)$',
                       live.get("/metrics").text, re.MULTILINE)  # fmt: skip
    return sum(map(float, found))
