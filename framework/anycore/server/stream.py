"""One request as the front sees it: the deltas that come, what ends it, and the record that is left of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from anycore import errors
from anycore.engine.request import Delta, FinishReason, NewRequest, RequestRecord
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError, Overloaded
from anycore.server import visits


class Observer(Protocol):
    """Who is told about an engine and its requests: metrics and plugins."""

    def begin(self, card: dict[str, Any], stats: Callable[[], Stats]) -> None: ...  # it is ready
    def token_after(self, seconds: float) -> None: ...  # since the sequence's token before
    def refused(self, code: str | None) -> None: ...
    def engine_restarted(self, reason: str) -> None: ...  # it ended, and another one is started
    def finished(self, record: RequestRecord, request: NewRequest) -> None: ...


class Owner(Protocol):
    """What a stream needs of the client it belongs to."""

    observer: Observer

    @property
    def name(self) -> str: ...  # of the model
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def forget(self, stream: Stream) -> None: ...


class Stream:
    """The deltas of one request, in order, until every sequence has finished.

    What arrives while nobody takes it becomes one delta a sequence: a front that falls behind sends fewer, longer
    pieces and catches up.

    Use it as `async with client.submit(request) as stream`, then `async for delta in stream`. An error of the engine
    is raised as the AnycoreError whose envelope the client should see.
    """

    def __init__(self, owner: Owner, request: NewRequest) -> None:
        self.request = request
        self._owner = owner
        self._arrived = asyncio.Event()
        self._deltas: dict[int, Delta] = {}  # what has arrived and was not taken yet, by sequence
        self._error: AnycoreError | None = None
        self._admitted = False
        self._open = set(range(request.sampling.n if request.sampling else 1))
        self._submitted = time.monotonic()
        self._first = 0.0
        self._last: dict[int, float] = {}  # when each sequence had its last token
        self._queued = 0.0
        self._cached = self._generated = self._preemptions = 0
        self._lengths = [0] * len(self._open)  # tokens generated, by sequence
        self._recorded = False
        self._visit = visits.current()

    @property
    def summary(self) -> str:
        """Which request this is and how far, for the log."""
        return f"{self.request.id} ({len(self.request.token_ids)} prompt tokens, {self._generated} generated)"

    def stop(self, index: int = 0) -> None:
        """End one sequence here (a stop string was found), and in the engine."""
        self._open.discard(index)
        self._deltas.pop(index, None)
        if not self._recorded:
            self._owner.abort(self.request.id, index)
            if not self._open:
                self._record(FinishReason.STOP)
        self._arrived.set()

    def close(self) -> None:
        """End the request if it has not ended: nothing of it stays in the engine."""
        if not self._recorded:
            self._owner.abort(self.request.id)
            self._record(FinishReason.ABORT)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error:
                raise self._error
            if not self._open or self._recorded:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.pop(next(iter(self._deltas)))

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    # --- what the client calls ----------------------------------------------------------------------------------

    def admit(self) -> None:
        self._admitted = True
        self._arrived.set()

    def take(self, delta: Delta) -> None:
        """Accept a delta that came from the engine."""
        if delta.index not in self._open:
            return  # stopped here, while the engine had one more token under way
        if delta.error is not None:
            self.fail(error_of(delta.error, delta.error_code), abort=len(self._open) > 1)
            return
        now = time.monotonic()
        if delta.token_ids or delta.finish:
            self._queued = self._queued or delta.queue_seconds
            self._cached = max(self._cached, delta.cached_tokens)
            self._generated += len(delta.token_ids)
            self._lengths[delta.index] += len(delta.token_ids)
            if delta.index in self._last:
                self._owner.observer.token_after(now - self._last[delta.index])
            self._first = self._first or now
            self._last[delta.index] = now
        earlier = self._deltas.get(delta.index)
        self._deltas[delta.index] = delta if earlier is None else joined(earlier, delta)
        if delta.finish:
            self._preemptions += delta.preemptions
            self._open.discard(delta.index)
            if not self._open:
                self._record(delta.finish)
        self._arrived.set()

    def fail(self, error: AnycoreError, *, abort: bool = False) -> None:
        """End the request with an error, after the deltas that have arrived."""
        self._error = error
        if abort:
            self._owner.abort(self.request.id)
        if self._admitted:
            self._record(FinishReason.ERROR)
        else:
            self._recorded = True
            self._owner.forget(self)
            self._owner.observer.refused(error.code)
        self._arrived.set()

    def _record(self, finish: FinishReason) -> None:
        if self._recorded:
            return
        self._recorded = True
        self._owner.forget(self)
        request, now = self.request, time.monotonic()
        record = RequestRecord(
            id=request.id,
            model=self._owner.name,
            task=request.task,
            prompt_tokens=len(request.token_ids),
            cached_tokens=self._cached,
            output_tokens=self._generated,
            sequences=request.sampling.n if request.sampling else 1,
            finish=finish.value,
            queue_seconds=self._queued,
            first_token_seconds=self._first - self._submitted if self._first else None,
            total_seconds=now - self._submitted,
            last_token_seconds=max(self._last.values()) - self._submitted if self._last else None,
            longest_output=max(self._lengths),
            preemptions=self._preemptions,
        )
        self._owner.observer.finished(record, request)
        if self._visit is not None:
            self._visit.finished(record, request)


def joined(earlier: Delta, later: Delta) -> Delta:
    """Make one delta of two that follow each other in a sequence."""
    if later.logprobs is not None:
        later.logprobs = [*(earlier.logprobs or ()), *later.logprobs]
    else:
        later.logprobs = earlier.logprobs
    later.token_ids = earlier.token_ids + later.token_ids
    later.prompt_logprobs = earlier.prompt_logprobs or later.prompt_logprobs
    later.cached_tokens = max(earlier.cached_tokens, later.cached_tokens)
    later.queue_seconds = max(earlier.queue_seconds, later.queue_seconds)
    return later


_KINDS: dict[str, type[AnycoreError]] = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AnycoreError)
}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}


def error_of(
    message: str, code: str | None, param: str | None = None, kind: str = "", retry_after: int = 1
) -> AnycoreError:
    """Make the exception again that the engine process met, from its class's name or else from its code."""
    known = _KINDS.get(kind) or _BY_CODE.get(code, AnycoreError)
    error = known(message, param=param, code=code)
    if isinstance(error, Overloaded):
        error.retry_after = retry_after
    return error
