"""What each engine of a model has to do, as a front knows it: what it sent there, and what the engine has reported."""

from __future__ import annotations

from typing import Any

import msgspec

from anycore.engine.request import Stats

GAUGES = ("running", "waiting", "deferred", "blocks", "blocks_free")
COUNTERS = (
    "steps",
    "padding_tokens",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "preemptions",
    "aborted",
    "finished",
    "failed",
)


class Loads:
    """Of one model, by the names of replicas."""

    def __init__(self) -> None:
        self._reported: dict[str, Stats] = {}
        self._open: dict[str, str] = {}  # request -> replica
        self._counts: dict[str, int] = {}  # of open requests
        self._gone = Stats()  # what those counted that are no more

    def __len__(self) -> int:
        return len(self._reported)

    def of(self, replica: str) -> int:
        """Sequences that a replica runs or has waiting."""
        stats = self._reported.get(replica)
        reported = 0 if stats is None else stats.running + stats.waiting
        return max(reported, self._counts.get(replica, 0))

    def begin(self, request: str, replica: str) -> None:
        self.end(request)  # it may have been refused elsewhere
        self._open[request] = replica
        self._counts[replica] = self._counts.get(replica, 0) + 1

    def end(self, request: str) -> None:
        replica = self._open.pop(request, None)
        if replica is not None:
            self._counts[replica] -= 1

    def keep(self, replicas: dict[str, dict[str, Any] | None]) -> None:
        """These are the replicas that there are, and what each has reported."""
        for name in self._reported.keys() - replicas.keys():
            _add(self._gone, self._reported.pop(name), COUNTERS)
            self._counts.pop(name, None)
            self._open = {request: replica for request, replica in self._open.items() if replica != name}
        for name, said in replicas.items():
            self._reported[name] = msgspec.convert(said, Stats) if said else self._reported.get(name, Stats())

    def total(self) -> Stats:
        """Gauges of all there are, counters of all there were."""
        total = Stats()
        _add(total, self._gone, COUNTERS)
        for stats in list(self._reported.values()):
            _add(total, stats, GAUGES + COUNTERS)
        return total


def _add(total: Stats, part: Stats, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(part, name))


LOADS: dict[str, Loads] = {}
"""Of this process, by the name of the engines' deployment: the router fills them, and metrics read them."""
