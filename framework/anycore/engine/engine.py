"""The engine: requests in, deltas out, one step at a time. Synchronous, one thread, no I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from anycore.contract.backend import Limits
from anycore.engine.admission import Admission, sequences_of
from anycore.engine.blocks import BlockPool
from anycore.engine.committer import Committer
from anycore.engine.grammar import MOMENT, Grammars
from anycore.engine.launched import Launched
from anycore.engine.live import Live
from anycore.engine.pace import Pace
from anycore.engine.request import Delta, NewRequest
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.engine.searches import Search, Texts, needs_texts
from anycore.engine.sequence import Status
from anycore.engine.stats import STEP_SEQUENCES, STEP_TOKENS, Stats
from anycore.errors import AnycoreError, BadRequest, DeadlineExceeded

Clock = Callable[[], float]


class Engine:
    """One model serving one task. `add`, `abort` and `step` are called from one thread, in any order."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: Limits,
        *,
        max_queued: int = 1024,
        timeout: float | None = None,
        seed: int = 0,
        card: dict[str, Any] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.card = card or {}  # what `/v1/models` tells
        self.spec = runner.model.spec
        self.task = runner.task
        self._max_queued = max_queued
        self._clock = clock
        self._admission = Admission(self.spec, self.task, limits, timeout, seed)
        self.grammars: Grammars | None = None  # set by whoever knows the tokens' texts; until then none is kept to
        self.texts: Texts | None = None  # likewise, for beam searches that look for stop strings
        self._reading: list[Search] = []  # those of them that wait for the tokenizer
        self._next_deadline = math.inf  # no request ends before it
        self._early: list[Delta] = []  # endings that no step brings: deadlines
        self._in_flight: Launched | None = None
        self._pace = Pace()
        self._live = Live(scheduler, self._no_stats(), self._forget_grammar)
        self._committer = Committer(self._live, self.spec, self.task)

    @property
    def pool(self) -> BlockPool | None:
        return self.scheduler.pool

    # --- what callers do ----------------------------------------------------------------------------------------

    def add(self, new: NewRequest) -> None:
        """Admit a request.

        Raises:
            Overloaded: the queue is full.
            BadRequest: it does not fit this engine; nothing was admitted.
        """
        ids = self._admission.check(new, grammars=self.grammars is not None, texts=self.texts is not None)
        if new.id in self._live.requests:
            raise BadRequest(f"request id {new.id!r} is in use", param="request_id")
        if not self.has_room(new):
            raise self._pace.refusal(len(self.scheduler.waiting), self._max_queued)
        now = self._clock()
        if new.sampling is not None and new.sampling.beams is not None:
            self._begin_search(new, now)
            return
        sequences = self._admission.sequences(new, ids, now)
        for sequence in sequences:
            sequence.leader = sequences[0] if sequence.index and self.pool else None
        self._live.requests[new.id] = sequences
        if self.grammars is not None and new.sampling is not None and new.sampling.grammar is not None:
            self.grammars.begin(new.id, new.sampling.grammar, now)
            for sequence in sequences:
                sequence.status = Status.COMPILING  # the scheduler hears of it when its grammar is ready
        else:
            self._live.enqueue(sequences)
        self._next_deadline = min(self._next_deadline, sequences[0].deadline)

    def has_room(self, new: NewRequest) -> bool:
        """Whether the queue takes this request now: those that can start at once do not count."""
        seats = max(0, self.limits.max_num_seqs - len(self.scheduler.running))
        awaited = self.grammars.awaited if self.grammars is not None else ()
        waiting = len(self.scheduler.waiting) + sum(len(self._live.requests[name]) for name in awaited)
        return waiting + sequences_of(new) <= self._max_queued + seats

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, and free what it holds. Unknown ids are fine: it may have ended."""
        for request in list(self._live.requests.get(request_id, [])):
            if index is None or (index == request.index and request.search is None):
                self._live.leave(request)
                self._live.searches.discard(request_id)
                self._live.stats.aborted += 1

    def drain(self) -> list[str]:
        """End the requests of which no sequence has run yet, and return their ids."""
        requests = self._live.requests.items()
        dropped = [name for name, parts in requests if not any(part.timing.started for part in parts)]
        for request_id in dropped:
            self.abort(request_id)
        return dropped

    def use_pause(self) -> bool:
        """Do what a later request would have to wait for, while there is no work; return whether there was anything."""
        return self.runner.use_pause()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._live.requests) or self._in_flight is not None or bool(self._early)

    def step(self) -> list[Delta]:
        """Compute one step and return what it added. With an overlapping backend, results come one step later."""
        ended = self._live.stats.finished
        self._expire()
        if self.grammars is not None and self.grammars.awaited:
            self._take_compiled(self.grammars)
        if self._reading and self.texts is not None:
            self._take_read(self.texts)
        deltas, self._early = self._early, []
        step = self.scheduler.schedule()
        overlap = self.runner.backend.overlap
        launched = self.runner.launch(step, overlap) if step.rows else None
        if launched is not None:
            self._live.stats.steps += 1
            self._live.stats.step_tokens.add(step.rows, STEP_TOKENS)
            self._live.stats.step_sequences.add(len(step.decodes) + len(step.chunks), STEP_SEQUENCES)
            now = self._clock()
            for chunk in step.chunks:  # where a request's first rows are
                timing = chunk.request.timing
                timing.started = timing.started or now
        if overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            deltas += self._commit(launched)
        self._pace.step(self._clock(), self._live.stats.finished - ended, self.has_work())
        return deltas

    def stats(self) -> Stats:
        """Gauges and counters as of now."""
        stats = self._live.stats
        between = self._between_steps()
        stats.running = len(self.scheduler.running) + between
        stats.waiting = len(self.scheduler.waiting) - between
        stats.deferred = min(self.scheduler.deferred, stats.waiting)
        stats.blocks_free = self.pool.free if self.pool else 0
        stats.preemptions = self.scheduler.preemptions
        stats.padding_tokens = self.runner.padding
        stats.op_fallbacks = dict(self.runner.backend.fallbacks)
        return stats

    def reset_prefix_cache(self) -> None:
        """Forget cached blocks that no request holds."""
        if self.pool is not None:
            self.pool.clear()

    def forget_stats(self) -> None:
        """Start counting anew, after the warm-up."""
        self._live.stats = self._no_stats()
        self._pace = Pace()
        self.scheduler.preemptions = self.runner.padding = 0

    # --- entering the queue --------------------------------------------------------------------------------------

    def _begin_search(self, new: NewRequest, now: float) -> None:
        self._live.searches.add(new.id)
        search = self._admission.search(new, now)
        self._live.requests[new.id] = requests = search.requests()
        self._next_deadline = min(self._next_deadline, requests[0].deadline)
        if not needs_texts(search.params):
            self._live.enqueue(requests)
            return
        self._reading.append(search)
        for request in requests:
            request.status = Status.COMPILING

    def _between_steps(self) -> int:
        """Beams that wait in the queue though their search is under way: they count as running."""
        requests = (request for name in self._live.searches for request in self._live.requests[name])
        return sum(request.status is Status.WAITING and request.timing.started > 0 for request in requests)

    def _take_read(self, texts: Texts) -> None:
        """Enqueue the searches that wait for the tokenizer if it is there now. With nothing else to do, wait for it."""
        read = texts.get()
        if len(self._reading) == len(self._live.requests) and self._in_flight is None and not self._early:
            wait([read], MOMENT)
        if not read.done():
            return
        searches, self._reading = self._reading, []
        for search in searches:
            known = self._live.requests.get(search.new.id, [])  # it may have ended
            requests = [request for request in known if request.search is search]
            error = read.exception()
            if error is not None:
                self._early += [self._live.fail(r, AnycoreError(f"no stop strings: {error}")) for r in requests]
                continue
            search.tokens = read.result()
            for request in requests:
                request.status = Status.WAITING
            self._live.enqueue(requests)

    def _take_compiled(self, grammars: Grammars) -> None:
        """Enqueue the requests whose grammar is ready now. With nothing else to do, wait a moment for one."""
        idle = len(grammars.awaited) == len(self._live.requests) and self._in_flight is None and not self._early
        for name, outcome in grammars.ready(self._clock(), idle):
            sequences = self._live.requests[name]
            if isinstance(outcome, AnycoreError):
                self._early += [self._live.fail(sequence, outcome) for sequence in sequences]
                continue
            for sequence in sequences:
                sequence.grammar, sequence.status = outcome.copy(), Status.WAITING
            self._live.enqueue(sequences)

    # --- results ------------------------------------------------------------------------------------------------

    def _commit(self, launched: Launched) -> list[Delta]:
        return self._committer.take(self.runner.collect(launched))

    def _expire(self) -> None:
        """End requests whose deadline has passed, waiting or running."""
        now = self._clock()
        if now < self._next_deadline:
            return
        late = [r for sequences in self._live.requests.values() for r in sequences if r.deadline <= now]
        for request in late:
            if request.status is Status.FINISHED:
                continue  # with another beam of its search
            waited = now - request.timing.arrived
            where = "in the queue" if not request.timing.started else "while running"
            self._early.append(self._live.fail(request, DeadlineExceeded(f"given up after {waited:.1f} s {where}")))
        left = (r.deadline for sequences in self._live.requests.values() for r in sequences)
        self._next_deadline = min(left, default=math.inf)

    def _no_stats(self) -> Stats:
        return Stats(blocks=self.pool.size if self.pool else 0)

    def _forget_grammar(self, request_id: str) -> None:
        if self.grammars is not None:
            self.grammars.awaited.pop(request_id, None)
