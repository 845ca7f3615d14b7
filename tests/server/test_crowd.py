"""More connections than file descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from server.harness import Live

from anycore.server import crowd


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limits of open files, which are set back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_asks_for_the_files_that_it_may_open(
    limits: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wanted = min(crowd.MOST, limits[1]) if limits[1] != resource.RLIM_INFINITY else crowd.MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted - 1, limits[1]))
    crowd.make_room()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, limits[1])
    crowd.make_room()
    assert caplog.messages == [f"open files: at most {wanted}, raised from {wanted - 1}"]


def test_connections_that_wait_are_told_of_in_a_line(
    echo: Live, limits: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each try was a traceback, of thousands a second. Afterwards the server answers as before."""
    host, port = httpx.URL(echo.url).host, httpx.URL(echo.url).port
    spare = os.open(os.devnull, os.O_RDONLY)
    crowded = [socket.socket() for _ in range(8)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))  # nothing above what is open now
    try:
        for client in crowded:
            client.connect((host, port))
        echo.wait(lambda: any("new connections wait" in message for message in caplog.messages), 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for client in crowded:
            client.close()
        os.close(spare)
    assert echo.get("/health").status_code == 200
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_other_errors_of_the_loop_are_told_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        crowd.watch(loop)
        loop.call_exception_handler({"message": "something else", "exception": OSError(errno.EMFILE, "too many")})
        with suppress(ValueError):
            raise ValueError

    asyncio.run(fail())
    assert "something else" in caplog.text
