"""How fast sequences end, measured while the engine is busy: what tells those who are refused when to come back."""

from __future__ import annotations

import math

from anycore.errors import Overloaded

WINDOW = 30.0  # busy seconds after which what was measured weighs half
LONGEST = 600  # seconds that anybody is told to wait


class Pace:
    """Counts ended sequences against the time in which there was work."""

    def __init__(self) -> None:
        self._ended = 0.0
        self._seconds = 0.0
        self._since: float | None = None  # when the time was last counted; None while there is no work

    def step(self, now: float, ended: int, busy: bool) -> None:
        """Take note of a step: how many sequences it ended, and whether there is more to do."""
        if self._since is not None:
            self._seconds += now - self._since
        self._ended += ended
        self._since = now if busy else None
        if self._seconds > WINDOW:
            self._ended /= 2
            self._seconds /= 2

    def refusal(self, waiting: int, max_queued: int) -> Overloaded:
        """What one more request is told when so many sequences wait."""
        return Overloaded(
            f"the queue is full: {waiting} sequences wait and {max_queued} may; retry later or raise --max-queued",
            retry_after=self.seconds_for(waiting),
        )

    def seconds_for(self, sequences: int) -> int:
        """In how many whole seconds so many sequences will have ended, going by the last minute; at least 1."""
        if self._ended == 0 or self._seconds == 0:
            return 1
        return min(LONGEST, max(1, math.ceil(sequences * self._seconds / self._ended)))
