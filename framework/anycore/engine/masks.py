"""Masks of the rows that keep to a grammar, made by a thread of their own without Python's lock.

That thread waits for a step's tokens itself, takes them, then fills the masks of the step after: what it is asked for
is done in order, so that a state is never used from two threads, and whoever launches steps waits only for the masks.
It is one thread, since several that share the rows took longer, the more of them the longer (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.engine.grammar import GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor


class Masks:
    """The masks of one engine. `seats` is the most rows that have one at a time."""

    def __init__(self, vocab: int, seats: int, memory: Memory) -> None:
        self.words = -(-vocab // 32)
        self._seats = seats
        self._memory = memory
        self._here: Tensor | None = None  # [seats, words] on the host, from where the device copies without help
        self._there: Tensor | None = None  # and on the device
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(1, "masks", initializer=_use, initargs=(memory.device,))
        self._filling: tuple[int, Future[None]] | None = None  # how many masks are under way

    def room(self, count: int) -> Tensor:
        """[count, words] int32 on the device: where `settle` brings the masks, always the same place."""
        if self._there is None:
            shape = self._seats, self.words
            self._there = torch.zeros(shape, dtype=torch.int32, device=self._memory.device)
            (self._here,) = self._memory.download([self._there])()
        return self._there[:count]

    def start(self, states: list[GrammarState]) -> None:
        """Begin to make the masks of a step's rows, once the tokens are taken that were named to `take` before.

        Tokens of the step before have arrived then, and with them all that was copied out of the room on the host.
        """
        self.room(len(states))
        assert self._here is not None
        self._filling = len(states), self._thread.submit(self.fill, states, self._here[: len(states)].numpy())

    def settle(self) -> None:
        """Bring the masks that were started last to the device, in order with what is launched."""
        assert self._filling is not None, "no masks were started"
        (count, filled), self._filling = self._filling, None
        filled.result()
        assert self._here is not None
        self._memory.renew(self.room(count), self._here[:count])

    def take(self, states: list[GrammarState], tokens: Callable[[], list[int]]) -> Future[None]:
        """Begin to move states on, each by its token. `tokens` waits for them, on the thread of the masks.

        What became of each the state itself says, once the future is done and until its next token is taken.
        """
        return self._thread.submit(self._take, states, tokens)

    def _take(self, states: list[GrammarState], tokens: Callable[[], list[int]]) -> None:
        moves = [(state.matcher, token) for state, token in zip(states, tokens(), strict=True)]
        for state, allowed in zip(states, self._native().consume_token_par(moves), strict=True):
            state.note(allowed)

    def fill(self, states: list[GrammarState], into: np.ndarray[Any, Any]) -> None:
        """Fill `into` [K, words] int32 on the host. A state that is in error allows everything."""
        from llguidance.numpy import fill_next_token_bitmask_par

        rows = [(state.matcher, row) for row, state in enumerate(states)]
        fill_next_token_bitmask_par(self._native(), rows, into)
        for matcher, row in rows:
            if matcher.is_error():
                into[row] = -1

    def _native(self) -> LLExecutor:
        """What runs the library's code on all rows in one call, without Python's lock."""
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(1)
        return self._executor


def _use(device: torch.device) -> None:
    """Let a new thread have to do with our device: to wait there would open the first one, or fail."""
    if device.index is not None:
        choose = getattr(torch.get_device_module(device), "set_device", None)
        if choose is not None:
            choose(device)
