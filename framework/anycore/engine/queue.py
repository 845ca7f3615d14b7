"""The requests that wait: each tenant's in a line of its own, and tenants take turns by what they have had.

A turn goes to the tenant that has had the fewest computed tokens for its weight, of those that wait. Who comes to an
empty line starts where the others are: what was not used while idle is not kept. This is start-time fair queueing with
the cost counted as it arises, for nobody knows how long an answer will be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from anycore.engine.sequence import Request


class Queue:
    """Lines of waiting requests. With one tenant, or without `fair`, it is one line sorted by rank."""

    def __init__(self, fair: bool = True) -> None:
        self._fair = fair
        self._lines: dict[str, list[Request]] = {}  # sorted by key; none is empty
        self._had: dict[str, float] = {}  # tokens for a weight of 1, by tenant
        self._floor = 0.0  # what the tenant of the last turn had had; nobody who comes later begins below
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return (request for line in self._lines.values() for request in line)

    @property
    def is_shared(self) -> bool:
        """Whether more than one tenant has been seen, so that what they have must be counted."""
        return len(self._had) > 1

    def add(self, request: Request) -> None:
        tenant = self._tenant(request)
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = []
            self._had[tenant] = max(self._had.get(tenant, 0.0), self._floor)
        if not line or line[-1].key <= request.key:
            line.append(request)  # as most are: the newest goes last
        else:
            insort(line, request, key=_rank)
        self._length += 1

    def remove(self, request: Request) -> None:
        tenant = self._tenant(request)
        line = self._lines[tenant]
        at = bisect_left(line, request.key, key=_rank)
        while line[at] is not request:  # others may have the same rank
            at += 1
        del line[at]
        self._length -= 1
        if not line:
            del self._lines[tenant]

    def start(self, request: Request) -> None:
        """Take out a request that is to run now."""
        self._floor = max(self._floor, self._had[self._tenant(request)])
        self.remove(request)

    def turns(self) -> Iterator[Request]:
        """Yield requests in the order in which they should start. Who takes one calls `start` before the next.

        One that is left where it is lets those behind it go first, of its own line as of others.
        """
        passed = dict.fromkeys(self._lines, 0)
        while passed:
            tenant = min(passed, key=lambda each: (self._had[each], self._lines[each][passed[each]].key))
            line, at = self._lines[tenant], passed[tenant]
            request = line[at]
            yield request
            if at < len(line) and line[at] is request:
                passed[tenant] += 1
            if passed[tenant] == len(line):
                del passed[tenant]

    def first(self, count: int) -> list[Request]:
        """Return so many in the order of `turns`."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return line[:count]
        return list(islice(self.turns(), count))

    def charge(self, request: Request, tokens: int) -> None:
        """Count tokens that are being computed for a request."""
        self._had[self._tenant(request)] += tokens / request.new.weight

    def _tenant(self, request: Request) -> str:
        return request.new.tenant if self._fair else ""


def _rank(request: Request) -> tuple[float, ...]:
    return request.key
