"""O02, M10: clients that send or read too slowly cost a connection for so long, and no longer."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from server.answers import ok
from server.conftest import served
from server.echo_engine import launch_echo
from server.harness import Live, serve_here
from server.test_tls import OPENSSL, make
from starlette.types import Message

from anycore.config import ServerConfig
from anycore.errors import ConfigError
from anycore.server import http
from anycore.server.gate import read_body
from anycore.server.slow import LEAST, Watch

LIMIT = 0.4  # seconds, for sending and for taking alike
PATIENCE = 60.0
STUCK = {"model": "say", "prompt": "one two three " * 9, "max_tokens": 99, "cache_salt": "stuck,tokens=60"}
WIDE = {"model": "say", "prompt": "one two three " * 9, "n": 100, "echo": True, "logprobs": 5}


@pytest.fixture(scope="module")
def live(t_lm: Path, t_bert: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "LOOK_TICKS", 1)
        models = served(t_lm, "say"), served(t_bert, "vector")
        with serve_here(*models, launch=launch_echo, read_timeout=LIMIT, write_timeout=LIMIT) as live:
            yield live


def connect(live: Live, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(live.url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect((parts.hostname, parts.port))
    return connection


def post(path: str, length: int) -> bytes:
    lines = f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}"
    return "\r\n".join((*lines, "", "")).encode()


def to_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while part := connection.recv(2**16):
        received += part
    return received


def dribble(connection: socket.socket, data: bytes) -> bytes:
    """Send byte by byte until the server closes the connection; return what it said."""
    end = time.monotonic() + PATIENCE
    for at in range(len(data)):
        assert time.monotonic() < end, "it was let go on"
        if select.select([connection], [], [], 0.05)[0]:
            return to_end(connection)
        connection.send(data[at : at + 1])
    raise AssertionError("all of it was read")


def error_in(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 "), answer
    assert b"\r\nconnection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert "--read-timeout" in error["message"]
    return error


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def test_headers_that_never_end_get_408(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n")
        assert "headers" in error_in(to_end(connection))["message"]


def test_headers_byte_by_byte_get_408_also_on_a_connection_that_was_used(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        error_in(dribble(connection, b"GET /version HTTP/1.1\r\n" + b"x-a: b\r\n" * 5000))


def test_a_body_that_stays_out_or_comes_byte_by_byte_gets_408(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(post("/v1/completions", 100) + b'{"model"')
        assert str(LEAST) in error_in(to_end(connection))["message"]
    with connect(live) as connection:
        connection.sendall(post("/v1/completions", 20_000))
        error_in(dribble(connection, b" " * 20_000))
    assert 'code="request_timeout"' in live.get("/metrics").text


def test_what_comes_after_an_early_answer_is_not_read_for_ever(live: Live) -> None:
    with connect(live) as connection:
        connection.sendall(post("/health", 10**9).replace(b"POST", b"HEAD"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionResetError):
            assert dribble(connection, b" " * 20_000) == b""


def test_a_quiet_connection_stays_open_between_requests(live: Live) -> None:
    with httpx.Client(base_url=live.url) as client:
        for _ in range(2):
            assert client.get("/version").status_code == 200
            time.sleep(2 * LIMIT)
        assert len(live.server.slots) == 2  # type: ignore[union-attr]


def test_m10_a_stream_that_nobody_reads_is_ended_and_its_request_aborted(live: Live) -> None:
    assert live.server is not None
    engine = live.server.clients[0]
    aborted = engine.stats.aborted
    content = json.dumps({**STUCK, "stream": True}).encode()
    with connect(live, receive_buffer=4096) as connection:
        connection.sendall(post("/v1/completions", len(content)) + content)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        until(lambda: engine.stats.aborted > aborted)
        until(lambda: not engine.live and not engine.stats.running)
        assert not to_end(connection).endswith(b"0\r\n\r\n")  # what chunks end with
    said = ok(live.post("/v1/completions", {"model": "say", "prompt": "still here", "max_tokens": 99}))
    assert said["choices"][0]["text"] == "still here"


@pytest.mark.skipif(OPENSSL is None, reason="the openssl command is not installed: it makes certificates")
def test_m10_the_same_over_tls(t_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LOOK_TICKS", 1)
    certificate, key = make(tmp_path, "own")
    settings = {"ssl_certfile": certificate, "ssl_keyfile": key, "write_timeout": LIMIT}
    content = json.dumps({**STUCK, "stream": True}).encode()
    with serve_here(served(t_lm, "say"), launch=launch_echo, **settings) as live:
        assert live.server is not None
        engine = live.server.clients[0]
        context = ssl.create_default_context(cafile=certificate)
        context.check_hostname = False
        with context.wrap_socket(connect(live, receive_buffer=4096)) as connection:
            connection.sendall(post("/v1/completions", len(content)) + content)
            until(lambda: engine.stats.aborted > 0)
            until(lambda: not engine.live and not engine.stats.running)


def test_a_whole_answer_that_nobody_takes_is_dropped(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="anycore.server.http")
    content = json.dumps(WIDE).encode()
    with connect(live, receive_buffer=4096) as connection:
        connection.sendall(post("/v1/completions", len(content)) + content)
        until(lambda: "cut off" in caplog.text)
        answer = to_end(connection)
    length = int(re.search(rb"content-length: (\d+)", answer[:500])[1])  # type: ignore[index]
    assert len(answer) < length


class Clock(asyncio.AbstractEventLoop):
    """A loop whose time is told, for connections without a network."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_later(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(cancel=lambda: None)


class Client(asyncio.Transport):
    """A client that takes what waits for it when told."""

    waiting = 0
    is_cut_off = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_cut_off = True


def connection_of(client: Client) -> tuple[http.EnvelopeProtocol, Clock]:
    clock = Clock()
    server = http.HttpServer(FastAPI(), None, read_timeout=10, write_timeout=10)
    connection = http.EnvelopeProtocol(server.config, server.server_state, {}, _loop=clock)
    connection.connection_made(client)
    return connection, clock


def test_a_slow_reader_who_keeps_reading_gets_all() -> None:
    client = Client()
    connection, clock = connection_of(client)
    client.waiting = 10 * LEAST
    while client.waiting:
        connection.look(10, 10)
        assert not client.is_cut_off
        clock.now += 9
        client.waiting -= LEAST
    for _ in range(3):
        client.waiting = 100
        connection.cycle = SimpleNamespace(response_complete=True)  # type: ignore[assignment]
        connection.look(10, 10)
        assert not client.is_cut_off  # another answer, another limit
        clock.now += 9
    clock.now += 9
    connection.look(10, 10)
    assert client.is_cut_off


def test_a_stream_that_stops_and_goes_on_is_not_cut_off() -> None:
    client = Client()
    connection, clock = connection_of(client)
    connection.cycle = SimpleNamespace(response_complete=False)  # type: ignore[assignment]
    for _ in range(5):
        client.waiting = 5 * LEAST  # at every look as much as before, but not the same
        connection.pause_writing()
        connection.look(10, 10)
        clock.now += 9
        connection.resume_writing()
    assert not client.is_cut_off


def test_a_large_body_may_take_longer_than_the_limit_if_it_keeps_coming() -> None:
    pieces = [b"{", *[b" " * LEAST] * 5, b"}"]

    async def read() -> Message:
        loop = asyncio.get_running_loop()
        clock, passed = loop.time, 0.0

        async def receive() -> Message:
            nonlocal passed
            passed += 900
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        loop.time = lambda: clock() + passed  # type: ignore[method-assign]
        return await (await read_body({b"content-type": b"application/json"}, receive, 10**6, 1000))()

    assert len(asyncio.run(read())["body"]) == 5 * LEAST + 2


def test_a_watch_asks_for_least_in_every_period() -> None:
    watch = Watch(10, now=0)
    watch.passed(LEAST - 1, now=9)
    assert watch.left(now=9) == 1
    watch.passed(LEAST, now=9)
    assert watch.left(now=9) == 10
    watch.passed(2 * LEAST - 1, now=18)
    assert watch.left(now=18) == 1
    assert Watch(0, now=0).left(now=1e9) > 0


@pytest.mark.parametrize("name", ["read_timeout", "write_timeout"])
def test_limits_are_checked(name: str) -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be 0 or more seconds"):
            ServerConfig(**{name: value})  # type: ignore[arg-type]
