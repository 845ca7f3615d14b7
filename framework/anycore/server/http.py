"""uvicorn, with errors of the HTTP layer in the OpenAI envelope and signals left to `lifecycle.Server`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from anycore.errors import BadRequest
from anycore.server.failures import error_response
from anycore.server.tls import Certificate

MAX_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_SECONDS = 75  # longer than balancers keep idle connections, so that they close first
CLOSE_SECONDS = 1  # that responses get to leave after the last request has ended


class EnvelopeProtocol(H11Protocol):
    """Answers what is not HTTP, or has headers over MAX_HEADER_BYTES, as every other error is answered."""

    def send_400_response(self, msg: str) -> None:
        error = BadRequest(
            f"this is not valid HTTP, or its headers exceed {MAX_HEADER_BYTES} bytes", code="invalid_http"
        )
        response = error_response(error)
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an app on an open socket until `should_exit` is set."""

    def __init__(self, app: FastAPI, certificate: Certificate | None = None) -> None:
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

    def retire(self) -> None:
        """Take no new connections; close idle ones now and busy ones after their answer."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @property
    def busy(self) -> bool:
        """Whether there are connections left."""
        return bool(self.server_state.connections)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
