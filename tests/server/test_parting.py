"""O02: a client that is answered before all it sends has been read gets to read the answer, within limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from server.fake_child import scripted
from server.harness import Live, serve_here

from anycore.config import ModelConfig
from anycore.server import parting
from anycore.server.parting import Parting

LIMIT = 20_000
LARGE = 64 * 2**20
PART = b" " * 2**20
PATIENCE = 60.0


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    with serve_here(model, keys=("key",), launch=scripted(str(t_lm)), max_body_size=LIMIT) as live:
        yield live


def connect(live: Live) -> socket.socket:
    parts = urlsplit(live.url)
    return socket.create_connection((parts.hostname, parts.port), PATIENCE)


def head(*more: str, key: str = "key") -> bytes:
    lines = "POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", f"authorization: Bearer {key}"
    return "\r\n".join((*lines, *more, "", "")).encode()


def to_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(2**16):
        received += part
    return received


def one_answer(connection: socket.socket) -> bytes:
    """The head of an answer after which the connection stays, once all of the answer has come."""
    received = b""
    while True:
        start, end, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", start.lower())
        if end and length is not None and len(body) >= int(length[1]):
            return start
        part = connection.recv(2**16)
        assert part, received
        received += part


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    start, _, body = answer.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nconnection: close" in start.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    return error


@pytest.mark.parametrize("more", [(), ("connection: close",)], ids=["kept", "close"])
@pytest.mark.parametrize("form", ["length", "chunks"])
def test_o02_all_of_a_body_far_over_the_limit_may_be_sent_before_the_413_is_read(
    live: Live, form: str, more: tuple[str, ...]
) -> None:
    with connect(live) as connection:
        if form == "length":
            connection.sendall(head(f"content-length: {LARGE}", *more))
            for _ in range(LARGE // len(PART)):
                connection.sendall(PART)
        else:
            connection.sendall(head("transfer-encoding: chunked", *more))
            for _ in range(LARGE // len(PART)):
                connection.sendall(b"%x\r\n%b\r\n" % (len(PART), PART))
            connection.sendall(b"0\r\n\r\n")
        error = error_in(to_end(connection), 413)
    assert error["code"] == "request_too_large"
    assert str(LIMIT) in error["message"]


def test_the_413_comes_before_the_body_and_without_a_100(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(head(f"content-length: {LARGE}", "expect: 100-continue"))
        assert error_in(to_end(connection), 413)["code"] == "request_too_large"
    with connect(live) as connection:  # one that is not too large is asked for
        body = b'{"model": "lm", "prompt": "a", "max_tokens": 1}'
        connection.sendall(head(f"content-length: {len(body)}", "expect: 100-continue", "connection: close"))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_other_early_answers_are_read_too(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(head(f"content-length: {LARGE}", "connection: close", key="wrong"))
        for _ in range(LARGE // len(PART)):
            connection.sendall(PART)
        assert error_in(to_end(connection), 401)["code"] == "invalid_api_key"
    with connect(live) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        for _ in range(8):
            connection.sendall(PART)
        assert error_in(to_end(connection), 400)["code"] == "invalid_http"


def test_a_connection_is_kept_where_its_client_sends_all_of_a_refused_body(live: Live) -> None:
    with connect(live) as connection:
        for _ in range(2):
            connection.sendall(head("content-length: 5000", key="wrong"))
            assert one_answer(connection).startswith(b"HTTP/1.1 401 ")
            connection.sendall(b" " * 5000)


# --- limits -------------------------------------------------------------------------------------------------------


class Socket:
    """A transport that keeps what is done to it."""

    def __init__(self, half: bool = True) -> None:
        self.half = half
        self.done: list[str] = []

    def is_closing(self) -> bool:
        return "close" in self.done

    def can_write_eof(self) -> bool:
        return self.half

    def __getattr__(self, name: str) -> Any:
        return lambda: self.done.append(name)


def parted(now: list[float], **options: Any) -> tuple[Socket, Parting]:
    transport = Socket(**options)
    connection = Parting(cast(asyncio.Transport, transport), lambda: True, lambda: now[0])
    connection.close()
    assert connection.is_closing()
    assert connection.is_parting
    return transport, connection


def test_it_ends_after_so_many_bytes() -> None:
    transport, connection = parted([0.0])
    assert transport.done == ["write_eof", "resume_reading"]
    for _ in range(parting.MOST_SPARE // 2**20):
        connection.came(2**20)
    assert not transport.is_closing()
    connection.came(1)
    assert transport.is_closing()
    assert not connection.is_parting


def test_it_ends_after_so_long_and_when_nothing_comes() -> None:
    now = [0.0]
    transport, connection = parted(now, half=False)  # as under TLS
    assert transport.done == ["resume_reading"]
    while now[0] < parting.MOST_SECONDS:
        connection.look()
        assert not transport.is_closing()
        connection.came(2**20)
        now[0] += 2
    now[0] += 1
    connection.look()
    assert transport.is_closing()

    transport, connection = parted(now)
    connection.came(100)
    now[0] += parting.SILENT_SECONDS
    connection.look()
    assert transport.is_closing()


def test_a_second_close_and_one_with_nothing_unread_are_at_once() -> None:
    transport, connection = parted([0.0])
    connection.close()
    assert transport.is_closing()
    idle = Socket()
    Parting(cast(asyncio.Transport, idle), lambda: False, lambda: 0.0).close()
    assert idle.done == ["close"]
