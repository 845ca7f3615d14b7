"""An engine under a virtual clock: the scheduler and the block pool that a real one has, and a clock for a device.

It takes turns as `Engine.step` does. A backend that overlaps is a step ahead: the next one is scheduled and launched
while one is computed, so that what arrives meanwhile is seen a step later. Results that come while the host still
launches the next step wait for that.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.chains import Chain
from anycore.engine.request import NewRequest
from anycore.engine.scheduler import Scheduler, Step
from anycore.engine.sequence import Request
from anycore.simulate.steptime import StepTime, launching_of


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides how an engine runs."""

    limits: Limits
    overlap: bool = False
    caching: bool = True
    policy: str = "fcfs"
    fair: bool = True
    max_queued: int = 1024
    long_prompt_rows: int | None = None


class Keyed(BlockPool):
    """A block pool whose keys are no hashes: a simulated token stands for all before it, and so does a block's last.

    Its decisions are those of the real pool, at a fraction of the time.
    """

    def extend(self, chain: Chain, tokens: Tokens[int]) -> None:
        keys: Any = tokens[(len(chain.keys) + 1) * self.block_size - 1 :: self.block_size]
        chain.keys += keys
        chain.blocks += keys


class Sequence(Request):
    """A request, and what is noted of it. Moments are seconds of the virtual clock."""

    __slots__ = ("answer", "ended", "first", "front", "longest", "replica", "sent", "shown", "since", "since_output",
                 "talk", "turn", "widest")  # fmt: skip

    def __init__(self, number: int, tokens: list[int], output: int, priority: int, tenant: str, sent: float) -> None:
        new = NewRequest(id=str(number), task=Task.GENERATE, token_ids=tokens, priority=priority, tenant=tenant)
        super().__init__(new, 0, number, len(tokens) + output)
        self.answer = -(number << 24)  # its output tokens are numbered from here, and are nobody else's
        self.sent = sent
        self.first = math.nan  # its first token
        self.longest = 0.0  # between two of its tokens
        self.since = 0  # the turn from which on it has had a token in each
        self.since_output = 0  # and which token that was
        self.replica = 0  # the engine that has it
        self.front = 0  # and the front, which knows of the following
        self.ended = False  # that its last token has come
        self.shown = math.nan  # when it sent a piece of the answer last
        self.widest = 0.0  # between two of these
        self.talk: Any = None  # the conversation that it is part of
        self.turn = 0  # and its place in it


@dataclass(slots=True)
class Seen:
    """What an engine did: sums, and a number a turn."""

    ends: array[float] = field(default_factory=lambda: array("d"))  # when the results of each step came
    steady: array[int] = field(default_factory=lambda: array("I"))  # tokens that came a step after the one before
    gaps: list[float] = field(default_factory=list)  # between other tokens of a sequence
    rows: int = 0
    busy: float = 0.0  # seconds of steps
    kv: float = 0.0  # owned share of the blocks, times seconds
    kv_most: float = 0.0
    running: float = 0.0  # sequences, times seconds
    waiting_most: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class VirtualEngine:
    """One engine. `next_turn` is when it has to be given a turn; inf while it has nothing to do."""

    def __init__(self, settings: Settings, seconds: StepTime) -> None:
        limits = settings.limits
        self.settings = settings
        self.pool = Keyed(limits.blocks, limits.block_size, settings.caching)
        self.scheduler = Scheduler(limits, self.pool, settings.policy, settings.fair, settings.long_prompt_rows)
        self.seen = Seen()
        self.next_turn = math.inf
        self.told: list[Sequence] = []  # those that had a token in the last turn, if somebody wants to be told
        self.tells = False
        self._seconds = seconds
        self._launching = launching_of(seconds)
        self._filling = False  # one step is launched, and nothing to wait for before the next
        self._depth = 2 if settings.overlap else 1
        self._inbox: list[Sequence] = []
        self._flight: deque[tuple[Step, float]] = deque()  # launched, and when each will have been computed
        self._resuming: set[Sequence] = set()  # preempted ones that have their prompt computed again

    def send(self, sequence: Sequence, now: float) -> None:
        """Put a request where the next turn finds it."""
        self._inbox.append(sequence)
        if not self._flight:
            self.next_turn = now

    def turn(self) -> tuple[list[Sequence], list[Sequence]]:
        """Take what came and the results that are due, and launch what follows; return who finished, who is refused."""
        now = self.next_turn
        finished: list[Sequence] = []
        refused: list[Sequence] = []
        flight = self._flight
        if flight and not self._filling:
            finished = self._commit(flight.popleft()[0], now)
        self._filling = False
        while len(flight) < self._depth:
            if self._inbox:
                refused += self._admit(now)
            step = self.scheduler.schedule()
            if not step.decodes and not step.chunks:
                break
            host = self._launch(step, now)
            now += host
            if host and len(flight) < self._depth:
                self._filling, self.next_turn = True, now
                return finished, refused
        assert flight or not self.scheduler.waiting, "requests wait and nothing runs"
        self.next_turn = max(flight[0][1], now) if flight else math.inf
        return finished, refused

    def _admit(self, now: float) -> list[Sequence]:
        """Queue what has come; return those for which the queue is too long, by the rule of `Engine.has_room`."""
        scheduler, most = self.scheduler, self.settings.max_queued
        refused = []
        for sequence in self._inbox:
            seats = max(0, self.settings.limits.max_num_seqs - len(scheduler.running))
            if len(scheduler.waiting) + 1 > most + seats:
                refused.append(sequence)
            else:
                scheduler.add(sequence, now)
        self._inbox.clear()
        return refused

    def _launch(self, step: Step, now: float) -> float:
        """Launch a step; return the seconds that the host takes for that, with which the device may begin."""
        seconds = self._seconds(step)
        host = self._launching(step) if self._launching is not None else 0.0
        begins = max(self._flight[-1][1], now) if self._flight else now
        self._flight.append((step, max(begins + seconds, now + host)))
        for chunk in step.chunks:
            if chunk.request.preemptions and not chunk.last:
                assert isinstance(chunk.request, Sequence)
                self._resuming.add(chunk.request)
        seen, used = self.seen, 1 - self.pool.free / self.pool.size
        seen.rows += step.rows
        seen.busy += seconds
        seen.kv += used * seconds
        seen.running += len(self.scheduler.running) * seconds
        seen.kv_most = max(seen.kv_most, used)
        seen.waiting_most = max(seen.waiting_most, len(self.scheduler.waiting))
        return host

    def _commit(self, step: Step, now: float) -> list[Sequence]:
        """Take a step's tokens. This loop runs for every token: it stays short."""
        finished: list[Any] = []
        seen = self.seen
        place = len(seen.ends)
        seen.ends.append(now)
        decodes: list[Any] = step.decodes
        for request in decodes:
            tokens = request.tokens
            tokens.append(request.answer - len(tokens))
            if len(tokens) >= request.max_total:
                finished.append(request)
        late: list[Any] = []
        if self._resuming:  # the last row of a prompt that is computed again counts as a decode, too
            late = [request for request in decodes if request in self._resuming]
        seen.steady.append(len(decodes) - len(late))
        seen.output_tokens += len(decodes)
        for request in late:
            self._resume(request, place, len(request.tokens) - 1)
        for chunk in step.chunks:
            if chunk.last:
                self._take(chunk.request, place, now, finished)
        if self.tells:
            firsts: list[Any] = [chunk.request for chunk in step.chunks if chunk.last]
            self.told = decodes + firsts
        for request in finished:
            request.longest = max(request.longest, self._longest(request.since, place))
            self.scheduler.remove(request)
        return finished

    def _take(self, request: Any, place: int, now: float, finished: list[Any]) -> None:
        """Take the token that the last chunk of a prompt brings: the first one, or the next after a preemption."""
        before = len(request.tokens)
        request.tokens.append(request.answer - before)
        self.seen.output_tokens += 1
        if before == request.num_prompt:
            request.first, request.since = now, place
            self.seen.prompt_tokens += before
            self.seen.cached_tokens += request.cached
        else:
            self._resume(request, place, before)
        if before + 1 >= request.max_total:
            finished.append(request)

    def _resume(self, request: Sequence, place: int, before: int) -> None:
        """Note the gap that a preemption has left between a sequence's tokens."""
        outputs = before - request.num_prompt
        last = request.since + outputs - 1 - request.since_output
        gap = self.seen.ends[place] - self.seen.ends[last]
        self.seen.gaps.append(gap)
        request.longest = max(request.longest, self._longest(request.since, last), gap)
        request.since, request.since_output = place, outputs
        self._resuming.discard(request)

    def _longest(self, first: int, last: int) -> float:
        """The longest time between two turns, from one turn to another."""
        if last <= first:
            return 0.0
        ends = np.frombuffer(self.seen.ends[first : last + 1])
        return float((ends[1:] - ends[:-1]).max())
