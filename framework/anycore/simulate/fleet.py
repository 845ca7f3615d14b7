"""Several engines behind one front: who is sent where and when, and what became of each request."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

from anycore.server.routing import MOST_BLOCKS, Holders, choose, slack_of
from anycore.simulate.arrivals import Conversation
from anycore.simulate.engine import Seen, Sequence, Settings, VirtualEngine
from anycore.simulate.front import Connections, Front
from anycore.simulate.measured import FrontTimes
from anycore.simulate.steptime import StepTime


@dataclass(slots=True)
class Outcomes:
    """A number for each request that was answered, in the order of their ends. Seconds of the virtual clock."""

    sent: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    longest: array[float] = field(default_factory=lambda: array("d"))  # between two of its tokens
    prompt: array[int] = field(default_factory=lambda: array("I"))
    output: array[int] = field(default_factory=lambda: array("I"))
    refused: int = 0
    too_long: int = 0
    preemptions: int = 0
    engines: list[Seen] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    replicas: int = 1


class Place(IntEnum):
    """Where a request is."""

    CLIENT = 0  # on its way to a front
    PASSED = 1  # on its way to an engine
    OUT = 2  # answered


class Fleet:
    """`replicas` equal engines, and the rule by which a server with several divides requests among them.

    Args:
        times: what a front is busy with; None: it takes no time.
        fronts: processes that share the port.
        delay: seconds that pass for each request beside that, whatever else is under way.
        most_open: conversations that may be open at once; None: no limit.
    """

    def __init__(
        self,
        settings: Settings,
        step_times: Iterable[StepTime],
        times: FrontTimes | None = None,
        fronts: int = 1,
        delay: float = 0.0,
        most_open: int | None = None,
    ) -> None:
        self.settings = settings
        self.engines = [VirtualEngine(settings, seconds) for seconds in step_times]
        self.fronts = [Front(times) for _ in range(fronts)] if times is not None else []
        self._connections = Connections(fronts)
        for engine in self.engines:
            engine.tells = bool(self.fronts)
        self._delay = delay
        self._most_open = math.inf if most_open is None else most_open
        self._open = [0] * len(self.engines)
        self._holders = Holders(len(self.engines))
        self._rotation = 0
        self._talks = 0  # conversations that are open
        self._numbers = count(1)
        self._events: list[tuple[float, int, Sequence, Place]] = []  # when, a number, what, where it is
        self._outcomes = Outcomes(replicas=len(self.engines))
        self._source: Iterator[Conversation] = iter(())
        self._ahead: Conversation | None = None  # the next one, held back while there is no place

    def run(self, conversations: Iterable[Conversation]) -> Outcomes:
        """Serve them all, and tell what became of their requests."""
        self._source = iter(conversations)
        self._ahead = next(self._source, None)
        self._begin(0.0)
        engines, events, fronts = self.engines, self._events, self.fronts
        while True:
            engine = min(engines, key=_next_turn) if len(engines) > 1 else engines[0]
            due = engine.next_turn
            if fronts:
                front = min(fronts, key=_next_turn) if len(fronts) > 1 else fronts[0]
                due = min(due, front.next_turn)
            if events and events[0][0] <= due:
                self._event(*heapq.heappop(events))
            elif due == math.inf:
                break
            elif fronts and front.next_turn <= due:
                self._pass(front)
            else:
                self._turn(engine)
        self._outcomes.engines = [engine.seen for engine in engines]
        self._outcomes.fronts = fronts
        self._outcomes.preemptions = sum(engine.scheduler.preemptions for engine in engines)
        return self._outcomes

    def _turn(self, engine: VirtualEngine) -> None:
        now = engine.next_turn
        finished, refused = engine.turn()
        for sequence in refused:
            self._refuse(sequence, now)
        told, engine.told = engine.told, []
        if not self.fronts:
            for sequence in finished:
                self._finish(sequence, now)
        elif len(self.fronts) == 1:
            if told:
                self.fronts[0].report(told, finished, now)
        elif told:
            for number, front in enumerate(self.fronts):
                tokens = [sequence for sequence in told if sequence.front == number]
                front.report(tokens, [sequence for sequence in finished if sequence.front == number], now)

    def _pass(self, front: Front) -> None:
        """Give a front a pass. What comes of it comes at moments that lie ahead."""
        ended, asked = front.turn()
        for now, sequence in ended:
            heapq.heappush(self._events, (now, next(self._numbers), sequence, Place.OUT))
        for now, sequence in asked:
            heapq.heappush(self._events, (now + self._delay, next(self._numbers), sequence, Place.PASSED))

    # --- requests -----------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Send the next conversation when its time has come, if there is a place for it."""
        talk = self._ahead
        if talk is not None and self._talks < self._most_open:
            self._talks += 1
            self._ahead = None
            self._ask(talk, 0, [], max(now, talk.at))

    def _ask(self, talk: Conversation, turn: int, said: Tokens[int], now: float) -> None:
        asked = talk.turns[turn]
        number = next(self._numbers)
        sequence = Sequence(number, [*said, *asked.tokens], asked.output, talk.priority, talk.tenant, now)
        sequence.talk, sequence.turn = talk, turn
        heapq.heappush(self._events, (now, number, sequence, Place.CLIENT))

    def _event(self, now: float, number: int, sequence: Sequence, place: Place) -> None:
        if place is Place.OUT:
            self._finish(sequence, now)
            return
        if place is Place.CLIENT:
            if sequence.turn == 0:
                self._ahead = next(self._source, None)
                self._begin(now)
            if self.fronts:
                sequence.front = self._connections.take()
                self.fronts[sequence.front].ask(sequence, now)
                return
            if self._delay:
                heapq.heappush(self._events, (now + self._delay, number, sequence, Place.PASSED))
                return
        if sequence.max_total > self.settings.limits.max_model_len:
            self._outcomes.too_long += 1
            if self.fronts:
                self._connections.give_back(sequence.front)
            self._close(now)
            return
        sequence.replica = self._route(sequence)
        self._open[sequence.replica] += 1
        self.engines[sequence.replica].send(sequence, now)

    def _route(self, sequence: Sequence) -> int:
        """Choose an engine as `server.replicas` does."""
        if len(self.engines) == 1:
            return 0
        hashes: Any = []
        if self.settings.caching:
            size = self.settings.limits.block_size
            hashes = sequence.tokens[size - 1 : size * MOST_BLOCKS : size]
        matches = self._holders.matches(hashes)
        seats = self.settings.limits.max_num_seqs
        chosen = choose(self._open, matches, slack_of(seats), seats + self.settings.max_queued, self._rotation)
        self._holders.add(hashes, chosen)
        self._rotation = (chosen + 1) % len(self.engines)
        return chosen

    def _finish(self, sequence: Sequence, now: float) -> None:
        out = self._outcomes
        out.sent.append(sequence.sent)
        out.first.append(sequence.first)
        out.end.append(now)
        out.longest.append(sequence.widest if self.fronts else sequence.longest)
        out.prompt.append(sequence.num_prompt)
        out.output.append(len(sequence.tokens) - sequence.num_prompt)
        self._leave(sequence)
        talk: Conversation = sequence.talk
        if sequence.turn + 1 < len(talk.turns):
            self._ask(talk, sequence.turn + 1, sequence.tokens, now)
        else:
            self._close(now)

    def _refuse(self, sequence: Sequence, now: float) -> None:
        self._outcomes.refused += 1
        self._leave(sequence)
        self._close(now)

    def _leave(self, sequence: Sequence) -> None:
        self._open[sequence.replica] -= 1
        if self.fronts:
            self._connections.give_back(sequence.front)

    def _close(self, now: float) -> None:
        """A conversation has ended: another one may begin."""
        self._talks -= 1
        if self._ahead is not None:
            self._begin(now)


def _next_turn(one: VirtualEngine | Front) -> float:
    return one.next_turn
