"""uvicorn, with errors of the HTTP layer in the OpenAI envelope, limits for slow clients, and signals left to
`lifecycle.Server`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from anycore.errors import AnycoreError, BadRequest
from anycore.server.failures import error_response
from anycore.server.gate import SlowRequest
from anycore.server.parting import Parting
from anycore.server.slow import LEAST, Watch
from anycore.server.tls import Certificate

MAX_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_SECONDS = 75  # longer than balancers keep idle connections, so that they close first
CLOSE_SECONDS = 1  # that responses get to leave after the last request has ended
MOST_UNSENT = 64 * 2**10  # bytes of answers that wait in the kernel; without a limit it takes megabytes for nobody
TURNS = 8  # of the event loop, in which a connection that waits is taken, its request read and begun
TURN_SECONDS = 0.005
LOOK_TICKS = 10  # of a tenth of a second, between two looks at the connections

log = logging.getLogger(__name__)


class EnvelopeProtocol(H11Protocol):
    """A connection. Answers what is not HTTP, or has too long or too slow headers, as every other error is answered,
    and gives a client that has been answered before its end the time to read that."""

    _parting: Parting  # the transport
    _headers_since: float | None = None  # when the first byte of headers came that are not complete yet
    _taking: Watch | None = None  # of the client, while an answer waits for it
    _most = 0  # bytes that waited when that began
    _answer: object = None  # which one it was

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._parting = Parting(transport, lambda: self.conn.their_state is h11.SEND_BODY, self.loop.time)
        self.transport = cast(asyncio.Transport, self._parting)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)
        # Closes a connection on which nothing ever comes, as after an answer.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self.is_parting:
            self._parting.came(len(data))
            return
        if self._headers_since is None:
            self._headers_since = self.loop.time()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers_since = None

    def resume_writing(self) -> None:
        self._taking = None
        super().resume_writing()

    @property
    def is_parting(self) -> bool:
        """Whether it is closed but for what the client still sends."""
        return self._parting.is_parting

    def look(self, read_seconds: float, write_seconds: float) -> None:
        """Close the connection if its client sends its headers, or takes its answer, too slowly; 0 s: for ever."""
        now = self.loop.time()
        if self._is_stuck(write_seconds, now):
            log.info("a client took less than %d bytes of its answer in %g s: cut off", LEAST, write_seconds)
            self.transport.abort()
        elif self.is_parting:
            self._parting.look()
        elif self._headers_since is not None and 0 < read_seconds < now - self._headers_since:
            self._headers_since = None
            if self.transport.is_closing() or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
                return  # all that came has been dealt with
            if self.conn.our_state is h11.IDLE:
                self._refuse(SlowRequest(f"the headers did not come within {read_seconds:g} s (--read-timeout)"))
            else:  # it still sends the body of a request that has been answered
                self.transport.close()

    def _is_stuck(self, seconds: float, now: float) -> bool:
        """Whether the client has taken too little of what waits for it, while nothing is added to that."""
        size = self.transport.get_write_buffer_size()
        is_whole = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        if not size or not (is_whole or self.flow.write_paused):
            self._taking = None
            return False
        if self._taking is None or self._answer is not self.cycle:
            self._taking, self._most, self._answer = Watch(seconds, now), size, self.cycle
        self._taking.passed(self._most - size, now)
        return self._taking.left(now) <= 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            BadRequest(f"this is not valid HTTP, or its headers exceed {MAX_HEADER_BYTES} bytes", code="invalid_http")
        )

    def _refuse(self, error: AnycoreError) -> None:
        """Answer what has not become a request, and close the connection."""
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._parting.part()


class HttpServer(uvicorn.Server):
    """Serves an app on an open socket until `should_exit` is set. Limits are those of `ServerConfig`, in seconds."""

    def __init__(
        self, app: FastAPI, certificate: Certificate | None, *, read_timeout: float, write_timeout: float
    ) -> None:
        self._limits = read_timeout, write_timeout
        config = uvicorn.Config(
            app,
            http=EnvelopeProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        config.load()
        if certificate is not None:
            config.ssl = certificate.context
        super().__init__(config)

    async def retire(self) -> None:
        """Take no new connections, once those that have reached this machine are taken; close idle ones now and busy
        ones after their answer."""
        await self._close_port()
        for connection in list(self.server_state.connections):
            if not cast(EnvelopeProtocol, connection).is_parting:
                connection.shutdown()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close, once what has reached this machine is begun: the system resets what nobody has taken or read."""
        if not self.force_exit:
            await self._close_port()
        await super().shutdown(sockets)

    async def _close_port(self) -> None:
        """Only what comes between the last look and the end of the port is lost still."""
        await self._catch_up()
        for server in self.servers:
            server.close()
        await self._catch_up()

    async def _catch_up(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(TURN_SECONDS)

    @property
    def busy(self) -> bool:
        """Whether there are connections left."""
        return bool(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Do what is to be done each tenth of a second; return whether to stop."""
        if counter % LOOK_TICKS == 0:
            for connection in list(self.server_state.connections):
                cast(EnvelopeProtocol, connection).look(*self._limits)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
