"""The engine: requests in, deltas out, one step at a time. Synchronous, one thread, no I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from anycore.contract.backend import Limits
from anycore.contract.declare import Task
from anycore.engine.admission import Admission, sequences_of
from anycore.engine.beams import Branch
from anycore.engine.blocks import BlockPool
from anycore.engine.grammar import Grammars, GrammarState
from anycore.engine.launched import Launched, Results, Vector
from anycore.engine.pace import Pace
from anycore.engine.pooling import finish_scores, finish_vector
from anycore.engine.request import (
    STEP_SEQUENCES,
    STEP_TOKENS,
    Delta,
    FinishReason,
    NewRequest,
    PoolingParams,
    Request,
    Stats,
    Status,
)
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.engine.searches import MOMENT, Search, Texts, needs_texts
from anycore.errors import (
    AnycoreError,
    BadRequest,
    DeadlineExceeded,
    InvalidGrammar,
    NonFiniteOutput,
)

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
        self._requests: dict[str, list[Request]] = {}  # unfinished sequences by request id
        self._searches: set[str] = set()  # request ids of unfinished beam searches
        self._reading: list[Search] = []  # those of them that wait for the tokenizer
        self._next_deadline = math.inf  # no request ends before it
        self._early: list[Delta] = []  # endings that no step brings: deadlines
        self._in_flight: Launched | None = None
        self._pace = Pace()
        self._stats = Stats(blocks=self.pool.size if self.pool else 0)

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
        if new.id in self._requests:
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
        self._requests[new.id] = sequences
        if self.grammars is not None and new.sampling is not None and new.sampling.grammar is not None:
            self.grammars.begin(new.id, new.sampling.grammar, now)
            for sequence in sequences:
                sequence.status = Status.COMPILING  # the scheduler hears of it when its grammar is ready
        else:
            self._enqueue(sequences)
        self._next_deadline = min(self._next_deadline, sequences[0].deadline)

    def has_room(self, new: NewRequest) -> bool:
        """Whether the queue takes this request now: those that can start at once do not count."""
        seats = max(0, self.limits.max_num_seqs - len(self.scheduler.running))
        awaited = self.grammars.awaited if self.grammars is not None else ()
        waiting = len(self.scheduler.waiting) + sum(len(self._requests[name]) for name in awaited)
        return waiting + sequences_of(new) <= self._max_queued + seats

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, and free what it holds. Unknown ids are fine: it may have ended."""
        for request in list(self._requests.get(request_id, [])):
            if index is None or (index == request.index and request.search is None):
                self._leave(request)
                self._searches.discard(request_id)
                self._stats.aborted += 1

    def drain(self) -> list[str]:
        """End the requests of which no sequence has run yet, and return their ids."""
        dropped = [name for name, parts in self._requests.items() if not any(part.timing.started for part in parts)]
        for request_id in dropped:
            self.abort(request_id)
        return dropped

    def use_pause(self) -> bool:
        """Do what a later request would have to wait for, while there is no work; return whether there was anything."""
        return self.runner.use_pause()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests) or self._in_flight is not None or bool(self._early)

    def step(self) -> list[Delta]:
        """Compute one step and return what it added. With an overlapping backend, results come one step later."""
        ended = self._stats.finished
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
            self._stats.steps += 1
            self._stats.step_tokens.add(step.rows, STEP_TOKENS)
            self._stats.step_sequences.add(len(step.decodes) + len(step.chunks), STEP_SEQUENCES)
            now = self._clock()
            for chunk in step.chunks:  # where a request's first rows are
                timing = chunk.request.timing
                timing.started = timing.started or now
        if overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            deltas += self._commit(launched)
        self._pace.step(self._clock(), self._stats.finished - ended, self.has_work())
        return deltas

    def stats(self) -> Stats:
        """Gauges and counters as of now."""
        stats = self._stats
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
        self._stats = Stats(blocks=self.pool.size if self.pool else 0)
        self._pace = Pace()
        self.scheduler.preemptions = self.runner.padding = 0

    # --- entering the queue --------------------------------------------------------------------------------------

    def _begin_search(self, new: NewRequest, now: float) -> None:
        self._searches.add(new.id)
        search = self._admission.search(new, now)
        self._requests[new.id] = requests = search.requests()
        self._next_deadline = min(self._next_deadline, requests[0].deadline)
        if not needs_texts(search.params):
            self._enqueue(requests)
            return
        self._reading.append(search)
        for request in requests:
            request.status = Status.COMPILING

    def _between_steps(self) -> int:
        """Beams that wait in the queue though their search is under way: they count as running."""
        requests = (request for name in self._searches for request in self._requests[name])
        return sum(request.status is Status.WAITING and request.timing.started > 0 for request in requests)

    def _take_read(self, texts: Texts) -> None:
        """Enqueue the searches that wait for the tokenizer if it is there now. With nothing else to do, wait for it."""
        read = texts.get()
        if len(self._reading) == len(self._requests) and self._in_flight is None and not self._early:
            wait([read], MOMENT)
        if not read.done():
            return
        searches, self._reading = self._reading, []
        for search in searches:
            requests = [r for r in self._requests.get(search.new.id, []) if r.search is search]  # it may have ended
            error = read.exception()
            if error is not None:
                self._early += [self._fail(r, AnycoreError(f"no stop strings: {error}")) for r in requests]
                continue
            search.tokens = read.result()
            for request in requests:
                request.status = Status.WAITING
            self._enqueue(requests)

    def _enqueue(self, sequences: list[Request]) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence, sequence.timing.arrived)

    def _take_compiled(self, grammars: Grammars) -> None:
        """Enqueue the requests whose grammar is ready now. With nothing else to do, wait a moment for one."""
        idle = len(grammars.awaited) == len(self._requests) and self._in_flight is None and not self._early
        for name, outcome in grammars.ready(self._clock(), idle):
            sequences = self._requests[name]
            if isinstance(outcome, AnycoreError):
                self._early += [self._fail(sequence, outcome) for sequence in sequences]
                continue
            for sequence in sequences:
                sequence.grammar, sequence.status = outcome.copy(), Status.WAITING
            self._enqueue(sequences)

    # --- results ------------------------------------------------------------------------------------------------

    def _commit(self, launched: Launched) -> list[Delta]:
        """Take a step's results. Rows of requests that ended while it was under way are cut."""
        results = self.runner.collect(launched)
        for request, start, scores in results.prompt:
            del request.prompt_scores[start:]
            request.prompt_scores += scores
        deltas = self._generated(results)
        for request, vector, finite in results.pooled:
            if request.status is not Status.FINISHED:
                deltas.append(self._pooled(request, vector) if finite else self._fail(request, _not_finite(request)))
        return deltas

    def _generated(self, results: Results) -> list[Delta]:
        """Append the sampled tokens and say which were the last. This loop runs for every token: it stays short."""
        deltas: list[Delta] = []
        finished = Status.FINISHED
        generated = 0
        rows = zip(results.sampled, results.tokens, results.finite, results.logprobs, strict=True)
        for request, token, finite, logprob in rows:
            if request.status is finished:
                continue
            if not finite:
                deltas.append(self._fail(request, _not_finite(request)))
                continue
            if request.search is not None:
                deltas += self._branched(request, request.search, results.branches[request])
                generated += 1
                continue
            tokens = request.tokens
            delta = Delta(id=request.id, index=request.index, token_ids=[token])
            deltas.append(delta)
            if len(tokens) == request.num_prompt and self._is_all(request, delta):
                continue
            tokens.append(token)
            generated += 1
            if logprob is not None:
                delta.logprobs = [logprob]
            if request.grammar is not None:
                end = self._leaves_grammar(request, request.grammar, token)
                if end is not None:
                    deltas.append(end)
                    continue
            if token in request.stop_ids and self._stops(request, delta, token):
                continue
            if len(tokens) >= request.max_total:
                self._finish(request, delta, FinishReason.LENGTH)
        self._stats.output_tokens += generated
        return deltas

    def _branched(self, request: Request, search: Search, branches: list[Branch]) -> list[Delta]:
        """Take what one beam's step brought. After the last one begin the next step, or return the answer."""
        if len(request.tokens) == request.num_prompt:
            self._is_all(request, search.told)
        self._leave(request)
        if not search.take(request, branches):
            return []
        if not search.done:
            self._requests[request.id] = search.requests()
            self._enqueue(self._requests[request.id])
            return []
        try:
            deltas = search.answer()
        except BadRequest as error:
            deltas = [_failed(request.id, error)]
            self._stats.failed += 1
        self._searches.discard(request.id)
        self._stats.finished += len(deltas)
        return deltas

    def _is_all(self, request: Request, delta: Delta) -> bool:
        """Say what is known once a prompt is computed; return whether the request ends with it, wanting no token."""
        params = request.new.sampling
        assert params is not None
        delta.cached_tokens = request.cached
        delta.queue_seconds = request.timing.started - request.timing.arrived
        if request.index == 0:
            self._stats.prompt_tokens += request.num_prompt
            self._stats.cached_tokens += request.cached
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *request.prompt_scores]
        if params.max_tokens != 0:
            return False
        delta.token_ids = []
        self._finish(request, delta, FinishReason.LENGTH)
        return True

    def _stops(self, request: Request, delta: Delta, token: int) -> bool:
        """End a request at a stop id, unless it must go on."""
        params = request.new.sampling
        assert params is not None
        if len(request.tokens) - request.num_prompt <= params.min_tokens:
            return False
        is_eos = token in request.eos_ids and not params.ignore_eos
        delta.stop_reason = None if is_eos else token
        self._finish(request, delta, FinishReason.STOP)
        return True

    def _leaves_grammar(self, request: Request, state: GrammarState, token: int) -> Delta | None:
        """Return the end of a request whose output is whole, or that has no way on, now that its grammar has moved."""
        if not state.allowed:
            why = state.error or "bans, biases and filters leave no token that it allows"
            return self._fail(request, InvalidGrammar(f"the output cannot keep to its grammar: {why}"))
        if state.ended and token not in request.stop_ids:
            return self._finish(request, Delta(id=request.id, index=request.index, all_text=True), FinishReason.STOP)
        return None

    def _pooled(self, request: Request, vector: Vector) -> Delta:
        params = request.new.pooling or PoolingParams()
        queued = request.timing.started - request.timing.arrived
        delta = Delta(id=request.id, cached_tokens=request.cached, queue_seconds=queued)
        if self.task is Task.RERANK and self.spec.score is not None and self.spec.score.kind != "cosine":
            delta.scores = finish_scores(vector, self.spec, params)
        else:
            delta.vector = finish_vector(vector, self.spec, params).tobytes()
        self._stats.prompt_tokens += request.num_prompt
        self._stats.cached_tokens += request.cached
        return self._finish(request, delta, FinishReason.STOP)

    def _finish(self, request: Request, delta: Delta, reason: FinishReason) -> Delta:
        delta.finish, delta.preemptions = reason, request.preemptions
        self._leave(request)
        self._stats.finished += 1
        return delta

    def _leave(self, request: Request) -> None:
        self.scheduler.remove(request)
        left = [other for other in self._requests[request.id] if other is not request]
        if left:
            self._requests[request.id] = left
        else:
            del self._requests[request.id]
            if self.grammars is not None:
                self.grammars.awaited.pop(request.id, None)

    def _fail(self, request: Request, error: AnycoreError) -> Delta:
        """End one sequence with an error; its neighbours go on, unless they are beams of one search."""
        self._stats.failed += 1
        delta = _failed(request.id, error, request.index if request.search is None else 0)
        if request.search is not None:
            self._searches.discard(request.id)
            for other in list(self._requests[request.id]):
                if other is not request:
                    self._leave(other)
        return self._finish(request, delta, FinishReason.ERROR)

    def _expire(self) -> None:
        """End requests whose deadline has passed, waiting or running."""
        now = self._clock()
        if now < self._next_deadline:
            return
        late = [r for sequences in self._requests.values() for r in sequences if r.deadline <= now]
        for request in late:
            if request.status is Status.FINISHED:
                continue  # with another beam of its search
            waited = now - request.timing.arrived
            where = "in the queue" if not request.timing.started else "while running"
            self._early.append(self._fail(request, DeadlineExceeded(f"given up after {waited:.1f} s {where}")))
        left = (r.deadline for sequences in self._requests.values() for r in sequences)
        self._next_deadline = min(left, default=math.inf)


def _not_finite(request: Request) -> AnycoreError:
    """What to tell of a row without a number; where a grammar meets bans of the caller's, these leave nothing."""
    sampling = request.new.sampling
    if request.grammar is not None and sampling is not None:
        bans = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            "bad_words": bool(sampling.bad_words_ids),
            "min_tokens": request.num_output <= sampling.min_tokens,
        }
        for name, given in bans.items():
            if given:
                return InvalidGrammar(f"the grammar and {name} together leave no token", param=name)
    return NonFiniteOutput("the model's output holds NaN or infinity")


def _failed(request_id: str, error: AnycoreError, index: int = 0) -> Delta:
    return Delta(id=request_id, index=index, error=error.message, error_code=error.code, finish=FinishReason.ERROR)
