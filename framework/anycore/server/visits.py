"""One HTTP request on its way through the server: what its log lines, its access line and its trace have in common.

`current` gives the visit that this piece of code runs for, in tasks and threads that it started, too.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anycore.errors import AnycoreError

if TYPE_CHECKING:  # whatever logs imports this, before a server has started its engines
    from anycore.engine.request import NewRequest, RequestRecord

KEPT = 64  # engine requests of one visit that are remembered one by one; a rerank may have thousands

_current: ContextVar[Visit | None] = ContextVar("visit", default=None)


@dataclass(slots=True)
class Ended:
    """A request of the engine that this visit made, and when it ended, in nanoseconds since 1970."""

    record: RequestRecord
    request: NewRequest
    at: int


@dataclass(slots=True)
class Visit:
    """What is known of an HTTP request. Counts are sums over the engine's requests that it led to."""

    id: str  # x-request-id
    method: str
    path: str
    began: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.monotonic)
    route: str = "none"  # as declared, once one was found
    status: int = 0
    error: str = ""  # code of what it was answered with
    key: str = ""  # name of the key it came with, never the key
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    ended: list[Ended] = field(default_factory=list)  # the first KEPT

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def finished(self, record: RequestRecord, request: NewRequest) -> None:
        """Take note of a request that the engine has done with."""
        self.model = record.model
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        if len(self.ended) < KEPT:
            self.ended.append(Ended(record, request, time.time_ns()))


def begin(visit: Visit) -> None:
    """Make this the visit of the task that runs."""
    _current.set(visit)


def current() -> Visit | None:
    """The visit that this code runs for; None outside of any."""
    return _current.get()


def failed(error: AnycoreError) -> None:
    """Take note of the error that the visit is answered with."""
    visit = _current.get()
    if visit is not None:
        visit.error = error.code or error.type
