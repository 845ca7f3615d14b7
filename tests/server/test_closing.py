"""The end of the port: what had reached the machine before is answered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from fastapi import FastAPI
from server.harness import patience

from anycore.server.http import HttpServer
from anycore.server.port import listen

ENDS: dict[str, Callable[[HttpServer, socket.socket], Awaitable[None]]] = {
    "the server ends": lambda server, listener: server.shutdown([listener]),
    "others take the port over": lambda server, listener: server.retire(),
}
ASK = b"GET /there HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("taken", [False, True])
def test_a_request_that_the_system_holds_is_answered_before_the_end(taken: bool, end: str) -> None:
    """`taken`: the server has its connection already, and only the request is new."""
    app = FastAPI()
    app.get("/there")(lambda: "still")

    async def test() -> bytes:
        listener = listen("127.0.0.1", 0)
        address = listener.getsockname()
        server = HttpServer(app, None, read_timeout=10, write_timeout=10)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        with socket.create_connection(address, 10 * patience()) as client:
            while taken and not server.busy:
                await asyncio.sleep(0.01)
            client.sendall(ASK)  # the loop has no turn between this and the end
            await ENDS[end](server, listener)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, 1)
            server.should_exit = True
            await serving
            return client.recv(1000)

    assert asyncio.run(test()).startswith(b"HTTP/1.1 200 ")
