"""The unfinished sequences of an engine: who they are, and how they end."""

from __future__ import annotations

from collections.abc import Callable

from anycore.engine.request import Delta, FinishReason
from anycore.engine.scheduler import Scheduler
from anycore.engine.sequence import Request
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError


class Live:
    """Every end of a sequence passes here: its blocks are freed, and it is counted.

    Args:
        gone: told the id of a request whose last sequence has ended.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, gone: Callable[[str], None]) -> None:
        self.scheduler = scheduler
        self.stats = stats
        self.requests: dict[str, list[Request]] = {}  # unfinished sequences by request id
        self.searches: set[str] = set()  # request ids of unfinished beam searches
        self._gone = gone

    def enqueue(self, sequences: list[Request]) -> None:
        """Let the scheduler know of sequences that have nothing to wait for but their turn."""
        for sequence in sequences:
            self.scheduler.add(sequence, sequence.timing.arrived)

    def finish(self, request: Request, delta: Delta, reason: FinishReason) -> Delta:
        """End a sequence; return its last delta."""
        delta.finish, delta.preemptions = reason, request.preemptions
        self.leave(request)
        self.stats.finished += 1
        return delta

    def fail(self, request: Request, error: AnycoreError) -> Delta:
        """End one sequence with an error; its neighbours go on, unless they are beams of one search."""
        self.stats.failed += 1
        delta = failed(request.id, error, request.index if request.search is None else 0)
        if request.search is not None:
            self.searches.discard(request.id)
            for other in list(self.requests[request.id]):
                if other is not request:
                    self.leave(other)
        return self.finish(request, delta, FinishReason.ERROR)

    def leave(self, request: Request) -> None:
        """Take a sequence out, whatever becomes of it."""
        self.scheduler.remove(request)
        left = [other for other in self.requests[request.id] if other is not request]
        if left:
            self.requests[request.id] = left
        else:
            del self.requests[request.id]
            self._gone(request.id)


def failed(request_id: str, error: AnycoreError, index: int = 0) -> Delta:
    return Delta(id=request_id, index=index, error=error.message, error_code=error.code, finish=FinishReason.ERROR)
