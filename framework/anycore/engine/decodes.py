"""Requests that decode: each goes on with one token a step, and a step does not look at them one by one.

What changes with every step is kept in arrays by seat, and adding 1 to all is one operation, however many they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from anycore.engine.sequence import Request

Array = np.ndarray[Any, np.dtype[np.int64]]


class Decodes:
    """Running requests that wait for nothing, in the order in which they came.

    Each has one token that is not computed, its last: computed tokens and one are all that it has.
    """

    def __init__(self, seats: int) -> None:
        """`seats` is the most requests that run at a time."""
        # Other objects whenever someone comes or goes: steps keep them.
        self.requests: list[Request] = []
        self.seats: Array = np.zeros(0, dtype=np.int64)
        self._computed: Array = np.zeros(seats, dtype=np.int64)  # tokens, by seat
        self._until: Array = np.zeros(seats, dtype=np.int64)  # up to so many there is nothing to do for it
        self.computed = self._computed.data  # the same numbers, faster to read one by one

    def keep(self, request: Request, until: int) -> None:
        """Let a request go on until so many of its tokens are computed."""
        self._until[request.seat] = until
        if request.decodes is None:
            self._computed[request.seat] = request.num_computed
            request.decodes = self
            self.requests = [*self.requests, request]
            self.seats = np.append(self.seats, request.seat)

    def drop(self, request: Request) -> None:
        """Take a request out if it is here."""
        if request.decodes is None:
            return
        computed, request.decodes = request.num_computed, None
        request.num_computed, request.num_tokens = computed, computed + 1
        row = self.requests.index(request)
        self.requests = self.requests[:row] + self.requests[row + 1 :]
        self.seats = np.delete(self.seats, row)

    def due(self) -> list[Request]:
        """Those that cannot go on as they are."""
        rows = np.flatnonzero(self._computed[self.seats] >= self._until[self.seats])
        return [self.requests[row] for row in rows.tolist()]

    def advance(self) -> Array:
        """Compute one token of each; return their positions."""
        positions: Array = self._computed[self.seats]
        self._computed[self.seats] = positions + 1
        return positions
