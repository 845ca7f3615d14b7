"""Closes connections so that their clients get to read the answer, though they are still sending.

Closing a socket on which unread bytes lie, or come later, resets the connection, and a client that is reset may lose an
answer that has already reached it. So we end our side only, and throw away what still comes, within limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from anycore.server.slow import Watch

MOST_SPARE = 256 * 2**20  # bytes that are thrown away
MOST_SECONDS = 30.0  # that it may take
SILENT_SECONDS = 5.0  # in which `slow.LEAST` bytes must come


class Parting:
    """A transport that is closed in this way. All else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool], clock: Callable[[], float]) -> None:
        """
        Args:
            unread: whether the client still sends what nobody will read.
            clock: counts seconds.
        """
        self._transport = transport
        self._unread = unread
        self._clock = clock
        self._spare = 0
        self._end = 0.0
        self._watch: Watch | None = None  # of what is thrown away

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_parting(self) -> bool:
        """Whether it is closed but for what the client still sends."""
        return self._watch is not None and not self._transport.is_closing()

    def is_closing(self) -> bool:
        return self._watch is not None or self._transport.is_closing()

    def close(self) -> None:
        if self._unread():
            self.part()
        else:
            self._transport.close()

    def part(self) -> None:
        """Close our side once all is sent that has been written, and the other one with the client or at a limit."""
        if self.is_closing():
            self._transport.close()
            return
        now = self._clock()
        self._end = now + MOST_SECONDS
        self._watch = Watch(SILENT_SECONDS, now)
        if self._transport.can_write_eof():  # not under TLS: the client knows the length of its answer
            self._transport.write_eof()
        self._transport.resume_reading()

    def came(self, size: int) -> None:
        """Throw away some bytes."""
        assert self._watch is not None
        self._spare += size
        self._watch.passed(self._spare, self._clock())
        if self._spare > MOST_SPARE:
            self._transport.close()

    def look(self) -> None:
        """Close the connection when its time is over."""
        now = self._clock()
        if self._watch is not None and (now > self._end or self._watch.left(now) <= 0):
            self._transport.close()
