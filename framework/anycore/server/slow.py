"""What counts as too slow a client: the same measure for bodies that come and for answers that go."""

from __future__ import annotations

import math

LEAST = 16 * 2**10  # bytes that must pass within the limit, or all that are left


class Watch:
    """Follows one transfer of bytes. It is late when fewer than LEAST have passed within `seconds`."""

    def __init__(self, seconds: float, now: float) -> None:
        """Begin. Times are in seconds of any one clock; 0 seconds: it is never late."""
        self._seconds = seconds or math.inf
        self._passed = 0
        self._end = now + self._seconds

    def passed(self, total: int, now: float) -> None:
        """Take note of the bytes that have passed since it began."""
        if total - self._passed >= LEAST:
            self._passed = total
            self._end = now + self._seconds

    def left(self, now: float) -> float:
        """Seconds until it is late."""
        return self._end - now
