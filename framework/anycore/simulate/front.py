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

ENTERING, OPENING = 10, 7
"""Passes from a request's first byte to the engine's command, and from its first token to the answer's first piece,
as counted in the server."""
BEFORE, BETWEEN = 0.65, 0.17
"""Shares of a request's work that are done in the ones and in the others, as timed there; the rest comes at its end."""

Moment = tuple[float, Sequence]


class Front:
    """One process. `next_turn` is when it has to be given a pass; inf while it has nothing to do."""

    def __init__(self, times: FrontTimes) -> None:
        self.next_turn = math.inf
        self.busy = 0.0
        self.chunks = self.tokens = 0
        self.gaps: Counter[int] = Counter()  # microseconds between two pieces of an answer
        self._times = times
        self._until = 0.0  # the end of the pass that was begun last
        self._new: list[tuple[int, Sequence]] = []  # requests, and the passes that each has left
        self._opening: dict[Sequence, int] = {}  # answers that have had their first token, and the passes left
        self._more: set[Sequence] = set()  # those of them that have had another since
        self._reports: list[tuple[Several[Sequence], Several[Sequence]]] = []
        self._is_noticed = False  # that there are reports: the next pass takes them
        self._late: dict[Sequence, None] = {}  # answers that have had tokens since they were written last

    def ask(self, sequence: Sequence, now: float) -> None:
        """A request comes."""
        self._new.append((ENTERING, sequence))
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
        began = self.next_turn
        now, ended = self._write(began)
        asked = []
        left = []
        for passes, sequence in self._new:
            now += BEFORE * self._request(sequence) / ENTERING
            if passes > 1:
                left.append((passes - 1, sequence))
            else:
                asked.append((now, sequence))
        self._new = left
        if self._is_noticed:
            now = self._read(now)
        else:
            self._is_noticed = bool(self._reports)
        self.busy += now - began
        self._until = now
        goes_on = self._late or self._new or self._opening or self._is_noticed
        self.next_turn = now if goes_on else math.inf
        return ended, asked

    def _write(self, now: float) -> tuple[float, list[Moment]]:
        """Send a piece of every answer that has had tokens; return when that is done, and which have ended."""
        ended: list[Moment] = []
        late, self._late = self._late, {}
        gaps, chunk = self.gaps, self._times.chunk
        for sequence in late:
            shown = sequence.shown
            if shown != shown:  # not a number: nothing of it was sent yet
                if sequence in self._opening:
                    self._more.add(sequence)
                else:
                    self._opening[sequence] = OPENING
                continue
            now += chunk
            self.chunks += 1
            gap = now - shown
            gaps[round(gap * 1e6)] += 1
            if gap > sequence.widest:
                sequence.widest = gap
            sequence.shown = now
            if sequence.ended:
                now = self._end(sequence, now, ended)
        for sequence, passes in list(self._opening.items()):
            now += BETWEEN * self._request(sequence) / OPENING
            self._opening[sequence] = passes - 1
            if passes > 1:
                continue
            del self._opening[sequence]
            now += chunk
            self.chunks += 1
            sequence.first = sequence.shown = now
            if sequence in self._more:
                self._more.remove(sequence)
                now += chunk
                self.chunks += 1
                gaps[round(chunk * 1e6)] += 1
                sequence.shown, sequence.widest = now, chunk
            if sequence.ended:
                now = self._end(sequence, now, ended)
        return now, ended

    def _end(self, sequence: Sequence, now: float, ended: list[Moment]) -> float:
        now += (1 - BEFORE - BETWEEN) * self._request(sequence)
        ended.append((now, sequence))
        return now

    def _read(self, now: float) -> float:
        """Take all that engines have reported; return when that is done."""
        reports, self._reports, self._is_noticed = self._reports, [], False
        now += self._times.wake
        for sequences, finished in reports:
            now += self._times.token * len(sequences)
            self.tokens += len(sequences)
            self._late |= dict.fromkeys(sequences)
            for sequence in finished:
                sequence.ended = True
        return now

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
