"""Which tokens are computed next. `schedule` makes a step and touches no tensor.

There is no prefill phase and no decode phase: a request has tokens, some of them computed, and each step hands out a
token budget so that "computed" catches up with "tokens". `schedule` may run again before the previous step's tokens
have come: one that only the device has seen counts among a request's tokens.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.decodes import Array, Decodes
from anycore.engine.queue import Queue
from anycore.engine.sequence import Request, Status

AGEING_TOKENS = 100
"""short-first: a second of waiting weighs as much as this many prompt tokens, so that nobody starves."""

AGEING_SECONDS = 60.0
"""priority: this many seconds of waiting weigh as much as one priority level, so that nobody starves."""

LENGTH_WINDOW = 4
"""Unsplit requests: how many times `max_num_seqs` waiting requests are looked at for similar lengths."""

EMPTY: Array = np.zeros(0, dtype=np.int64)

Policy = Callable[[Request, float], tuple[float, ...]]

POLICIES: dict[str, Policy] = {
    "fcfs": lambda request, now: (request.arrival,),
    "priority": lambda request, now: (request.new.priority + now / AGEING_SECONDS, request.arrival),
    "short-first": lambda request, now: (request.num_prompt + now * AGEING_TOKENS, request.arrival),
}
"""Rank of a request at arrival; smaller runs first. Ageing is linear, so the order of two requests never changes."""


@dataclass(slots=True)
class Entry:
    """Rows `start` … `start + rows` - 1 of a request in a step; `last` when they complete it, so output is due."""

    request: Request
    start: int
    rows: int
    last: bool


@dataclass(slots=True)
class Step:
    """One forward pass. Packed are first one row of each request in `decodes`, then the rows of `chunks`.

    Decodes are most of what runs, so they are no objects of their own.
    """

    decodes: list[Request] = field(default_factory=list)  # prompt computed: each goes on with its last token
    seats: Array = field(default_factory=lambda: EMPTY)  # theirs
    positions: Array = field(default_factory=lambda: EMPTY)  # of those tokens
    chunks: list[Entry] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return len(self.decodes) + sum(chunk.rows for chunk in self.chunks)

    @property
    def entries(self) -> list[Entry]:
        """All that is computed, in packing order."""
        return [Entry(r, p, 1, True) for r, p in zip(self.decodes, self.positions.tolist(), strict=True)] + self.chunks


class Scheduler:
    """Queues of one engine. `pool` is None for models without a KV cache, whose requests are never split.

    `policy` orders the requests of one tenant, and what runs; between tenants that wait, `fair` divides. Prompts
    that do not fit one step get `long_prompt_rows` of it together while shorter requests run or wait beside them.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool | None,
        policy: str = "fcfs",
        fair: bool = True,
        long_prompt_rows: int | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.policy = POLICIES[policy]
        self.long_prompt_rows = long_prompt_rows
        self._long_left = 0  # rows that long prompts may still get of the step being made
        self.waiting = Queue(fair)
        self.running: list[Request] = []  # sorted by key
        self.preemptions = 0
        self.deferred = 0  # waiting requests that the last step passed over: what they need was being computed
        self.decoding = Decodes(limits.max_num_seqs)
        self._seats = list(range(limits.max_num_seqs))
        # Blocks kept free when a new request is admitted, so that running ones can grow a little before preempting.
        self._watermark = max(1, pool.size // 100) if pool else 0

    def add(self, request: Request, now: float) -> None:
        """Queue a request. The engine has checked that it fits the limits alone."""
        request.key = self.policy(request, now)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, finished or aborted, and free its blocks."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.decoding.drop(request)
            if self.pool is not None:
                self._publish(request)
                self._free(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def schedule(self) -> Step:
        """Choose the rows of the next step; an empty step means that there is nothing to compute now."""
        if self.pool is None:
            return self._schedule_unsplit()
        step = Step()
        budget, preempted = self._schedule_running(step)
        if not preempted:
            self._admit(step, budget)
        for chunk in step.chunks:
            self._advance(chunk)
        if self.waiting.is_shared:
            for request in step.decodes:
                self.waiting.charge(request, 1)
        return step

    # --- paged requests -----------------------------------------------------------------------------------------

    def _schedule_running(self, step: Step) -> tuple[int, bool]:
        """Give running requests their rows, best rank first; return the budget left and whether any lost its blocks.

        Decodes come out of the budget before any prompt chunk, so that a long prompt never stalls them. Few of them
        need a look: the others have a block for their next token and wait for nothing.
        """
        assert self.pool is not None
        due = self.decoding.due() + [request for request in self.running if request.decodes is None]
        due.sort(key=_rank)
        rows_left = [_rows_left(request) for request in due]
        decodes = len(self.running) - len(due) + rows_left.count(1)
        budget = self.limits.max_num_batched_tokens - decodes
        self._long_left = self._long_share(budget, decodes)
        before = self.preemptions
        for request, left in zip(due, rows_left, strict=True):
            if left == 0 or request.status is not Status.RUNNING:
                self.decoding.drop(request)  # it waits for its token, or was preempted by an earlier one in this loop
                continue
            rows = 1 if left == 1 else self._chunk(request, left, budget)
            if rows == 0:
                continue
            if not self._grow(request, rows):
                continue  # it gave up its own blocks
            if left == 1 and request.prefilled and not request.needs_host:
                self._publish(request)
                self.decoding.keep(request, min(len(request.blocks) * self.pool.block_size, request.max_total - 1))
                continue
            if left > 1:
                budget -= rows
                self._charge_share(request, rows)
            step.chunks.append(Entry(request, request.num_computed, rows, rows == left))
        step.decodes, step.seats = self.decoding.requests, self.decoding.seats
        step.positions = self.decoding.advance()
        return budget, self.preemptions != before

    def _is_long(self, request: Request) -> bool:
        """Whether a prompt does not fit one step."""
        return request.num_prompt > self.limits.max_num_batched_tokens

    def _long_share(self, budget: int, decodes: int) -> int:
        """Rows of a step that long prompts get together."""
        if self.long_prompt_rows is None or not (decodes or any(not self._is_long(each) for each in self.waiting)):
            return budget
        return min(budget, self.long_prompt_rows)

    def _chunk(self, request: Request, left: int, budget: int) -> int:
        return min(left, budget, self._long_left) if self._is_long(request) else min(left, budget)

    def _charge_share(self, request: Request, rows: int) -> None:
        if self._is_long(request):
            self._long_left -= rows

    def _grow(self, request: Request, rows: int) -> bool:
        """Make room for `rows` more tokens, preempting lower ranks; False if the request had to give way itself."""
        assert self.pool is not None
        missing = self.pool.blocks_for(request.num_computed + rows) - len(request.blocks)
        if missing <= 0:
            return True
        while missing > self.pool.free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += self.pool.take(missing)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and queue it again; its tokens are recomputed later."""
        self.running.remove(request)
        self.decoding.drop(request)
        self._free(request)
        request.num_computed = 0
        request.status = Status.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.add(request)

    def _admit(self, step: Step, budget: int) -> None:
        """Move waiting requests into the step, in rank order, until budget, seats or blocks run out."""
        assert self.pool is not None
        self.deferred = 0
        for request in self.waiting.turns():
            if budget <= 0 or len(self.running) >= self.limits.max_num_seqs:
                break
            if not self._long_left and self._is_long(request):
                continue  # other long prompts have this step's share
            cached = self._cached(request)
            if cached is None:
                self.deferred += 1  # what it needs is being computed: it waits a step rather than computing it again
                continue
            reserve = self._watermark if self.running else 0
            needed = self.pool.blocks_for(request.num_tokens) - len(cached)
            idle = [self.pool.references[block] for block in cached].count(0)  # cached blocks are free ones, too
            if needed + idle + reserve > self.pool.free:
                break  # nobody overtakes the first in line, or it would starve
            self.waiting.start(request)
            self._start(request, cached)
            rows = self._chunk(request, request.remaining, budget)
            budget -= rows
            self._charge_share(request, rows)
            grown = self._grow(request, rows)
            assert grown, "admitted without room"
            step.chunks.append(Entry(request, request.num_computed, rows, rows == request.remaining))

    def _cached(self, request: Request) -> list[int] | None:
        """Return the blocks a waiting request can start from, or None if it should wait for another's.

        At least one token is left to compute, for its hidden state is needed.
        """
        assert self.pool is not None
        leader = request.leader
        if leader is not None:
            if leader.status is Status.RUNNING and leader.prefilled:
                return leader.blocks[: (request.num_prompt - 1) // self.pool.block_size]
            if leader.status is not Status.FINISHED and not leader.prefilled:
                return None
        if not self.pool.caching or not request.may_share:
            return []
        self.pool.extend(request.chain, request.tokens)
        keys = request.chain.keys
        most = min(len(keys), (request.num_tokens - 1) // self.pool.block_size)
        found = self.pool.match(request.chain, most)
        if len(found) < most and self.pool.is_coming(keys[len(found)]):
            return None
        return found

    def _start(self, request: Request, cached: list[int]) -> None:
        assert self.pool is not None
        self.pool.share(cached)
        request.blocks = list(cached)
        request.seat = self._seats.pop()
        request.published = len(cached)
        request.num_computed = len(cached) * self.pool.block_size
        if request.preemptions == 0:
            request.cached = request.leader.cached if request.leader else request.num_computed
        request.leader = None
        request.status = Status.RUNNING
        insort(self.running, request, key=_rank)
        if self.pool.caching and request.may_share:
            self.pool.extend(request.chain, request.tokens)
            request.expected = request.chain.keys[len(cached) :]
            self.pool.expect(request.expected)

    def _advance(self, entry: Entry) -> None:
        """Count an entry's rows as computed, and let others find the blocks that they fill.

        Steps run in order on the device, so a block may be found as soon as the step that fills it is made.
        """
        request = entry.request
        request.num_computed += entry.rows
        self.waiting.charge(request, entry.rows)
        if request.num_computed >= request.num_prompt:
            request.prefilled = True
        pool = self.pool
        if pool is not None and request.num_computed >= (request.published + 1) * pool.block_size:
            self._publish(request)
        if entry.last and not request.is_pooled:
            request.num_tokens += 1

    def _publish(self, request: Request) -> None:
        assert self.pool is not None
        if not self.pool.caching or not request.may_share:
            return
        full = min(request.num_computed, len(request.tokens)) // self.pool.block_size
        if full <= request.published:
            return
        self.pool.extend(request.chain, request.tokens)
        for i in range(request.published, full):
            self.pool.publish(request.blocks[i], request.chain, i)
        request.expected = request.expected[full - request.published :]
        request.published = full

    def _free(self, request: Request) -> None:
        """Take back what a running request holds."""
        assert self.pool is not None
        self._seats.append(request.seat)
        self.pool.settle(request.expected)
        self.pool.release(request.blocks)
        request.expected = []
        request.blocks = []
        request.published = 0

    # --- unsplit requests ---------------------------------------------------------------------------------------

    def _schedule_unsplit(self) -> Step:
        """Take the first in line and, within the token budget, those waiting requests that are nearest in length.

        The first in line always goes, so nobody starves; near lengths keep padding small where a backend pads.
        """
        step = Step()
        if not self.waiting:
            return step
        near = self.waiting.first(self.limits.max_num_seqs * LENGTH_WINDOW)
        chosen = near if len(near) == 1 else self._nearest(near)
        chosen.sort(key=lambda request: request.num_prompt)
        for request in chosen:
            self.waiting.start(request)
            request.status = Status.RUNNING
            entry = Entry(request, 0, request.num_prompt, True)
            step.chunks.append(entry)
            self._advance(entry)
        self.running += chosen
        self.running.sort(key=_rank)
        return step

    def _nearest(self, waiting: list[Request]) -> list[Request]:
        """The first, and those that are nearest to it in length, as far as seats and budget go."""
        seats, budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        lengths = np.array([request.num_prompt for request in waiting])
        distances = np.abs(lengths - lengths[0])
        distances[0] = -1
        order = np.argsort(distances, kind="stable")
        chosen: list[Request] = []
        while len(chosen) < seats:
            order = order[lengths[order] <= budget]  # what does not fit is passed over
            if not len(order):
                break
            sums = np.cumsum(lengths[order])
            count = min(int(np.searchsorted(sums, budget, "right")), seats - len(chosen))
            chosen += [waiting[i] for i in order[:count].tolist()]
            budget -= int(sums[count - 1])
            order = order[count:]
        return chosen


def _rows_left(request: Request) -> int:
    """Rows of a running request that the host may schedule now."""
    tokens = request.num_tokens
    if tokens > len(request.tokens) and (request.needs_host or tokens >= request.max_total):
        return 0  # its last token is under way, and the host has not seen it
    return tokens - request.num_computed


def _rank(request: Request) -> tuple[float, ...]:
    return request.key
