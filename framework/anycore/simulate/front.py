"""Front processes under the virtual clock: event loops that take what has come, one pass after the other.

A pass writes a piece of every answer that has had tokens, however many these are, brings each new request a stage
further, and takes all that engines have reported, which the next pass writes. What comes meanwhile waits for the next
one: a front that falls behind sends fewer, longer pieces, and requests that come together are ready together.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Sequence as Several

from anycore.simulate.engine import Sequence
from anycore.simulate.measured import FrontTimes

PASSES = 9
"""Turns of the event loop from a request's first byte to the engine's command, as counted in the server."""
BEFORE = 0.67
"""Share of a request's work that is done until then, as timed in the server; the rest comes with its answer's end."""

Moment = tuple[float, Sequence]


class Front:
    """One process. `next_turn` is when it has to be given a pass; inf while it has nothing to do."""

    def __init__(self, times: FrontTimes) -> None:
        self.next_turn = math.inf
        self.busy = 0.0
        self.chunks = self.tokens = self.requests = self.prompts = 0
        self.gaps: Counter[int] = Counter()  # microseconds between two pieces of an answer
        self._times = times
        self._until = 0.0  # the end of the pass that was begun last
        self._new: list[tuple[int, Sequence]] = []  # requests, and the stages that each has left
        self._reports: list[tuple[Several[Sequence], Several[Sequence]]] = []
        self._late: dict[Sequence, None] = {}  # answers that have had tokens since they were written last

    def ask(self, sequence: Sequence, now: float) -> None:
        """A request comes."""
        self._new.append((PASSES, sequence))
        self._wake(now)

    def report(self, sequences: Several[Sequence], finished: Several[Sequence], now: float) -> None:
        """An engine says that these have a token more, and that some of them are finished."""
        self._reports.append((sequences, finished))
        self._wake(now)

    def _wake(self, now: float) -> None:
        if self.next_turn == math.inf:
            self.next_turn = max(now, self._until)

    def turn(self) -> tuple[list[Moment], list[Moment]]:
        """A pass; return which answers have ended, and which requests leave for an engine, with the moments of both."""
        times, began = self._times, self.next_turn
        now, ended, asked = began, [], []
        late, self._late = self._late, {}
        gaps, chunk = self.gaps, times.chunk
        for sequence in late:
            now += chunk
            shown = sequence.shown
            if shown == shown:  # a number: there was one before
                gap = now - shown
                gaps[round(gap * 1e6)] += 1
                if gap > sequence.widest:
                    sequence.widest = gap
            else:
                sequence.first = now
            sequence.shown = now
            if sequence.ended:
                now += (1 - BEFORE) * self._request(sequence)
                ended.append((now, sequence))
        self.chunks += len(late)
        left = []
        for stages, sequence in self._new:
            now += BEFORE * self._request(sequence) / PASSES
            if stages > 1:
                left.append((stages - 1, sequence))
            else:
                asked.append((now, sequence))
                self.requests += 1
                self.prompts += sequence.num_prompt
        self._new = left
        if self._reports:
            now += times.wake
            reports, self._reports = self._reports, []
            for sequences, finished in reports:
                now += times.token * len(sequences)
                self.tokens += len(sequences)
                self._late |= dict.fromkeys(sequences)
                for sequence in finished:
                    sequence.ended = True
        self.busy += now - began
        self._until = now
        self.next_turn = now if self._late or self._new else math.inf
        return ended, asked

    def _request(self, sequence: Sequence) -> float:
        return self._times.request + self._times.prompt * sequence.num_prompt


class Connections:
    """Which front has which request: the system divides new connections, and a client takes an idle one if it can."""

    def __init__(self, fronts: int, seed: int = 0) -> None:
        self._fronts = fronts
        self._idle: deque[int] = deque()
        self._draw = random.Random(f"{seed} connections").random

    def take(self) -> int:
        return self._idle.popleft() if self._idle else int(self._draw() * self._fronts)

    def give_back(self, front: int) -> None:
        self._idle.append(front)
