"""What each engine of a model has to do, as a front knows it: what it sent there, and what comes with answers."""

from __future__ import annotations

from anycore.engine.stats import Stats

WORK = ("running", "waiting", "deferred")
BLOCKS = ("blocks", "blocks_free")
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
        """Requests of this front that a replica has."""
        return self._counts.get(replica, 0)

    def begin(self, request: str, replica: str) -> None:
        self.end(request)  # it may have been refused elsewhere
        self._open[request] = replica
        self._counts[replica] = self._counts.get(replica, 0) + 1

    def end(self, request: str) -> None:
        replica = self._open.pop(request, None)
        if replica is not None:
            self._counts[replica] -= 1

    def keep(self, replicas: set[str]) -> None:
        """These are the replicas that there are."""
        for name in self._reported.keys() - replicas:
            _add(self._gone, self._reported.pop(name), COUNTERS)
            self._counts.pop(name, None)
            self._open = {request: replica for request, replica in self._open.items() if replica != name}
        for name in replicas - self._reported.keys():
            self._reported[name] = Stats()

    def report(self, replica: str, stats: Stats) -> None:
        """What a replica has said at the end of a request."""
        if replica in self._reported:
            self._reported[replica] = stats

    def total(self) -> Stats:
        """Counters of all there were, gauges of all there are: of one without requests, nothing runs or waits."""
        total = Stats()
        _add(total, self._gone, COUNTERS)
        for name, stats in list(self._reported.items()):
            _add(total, stats, COUNTERS + BLOCKS + (WORK if self.of(name) else ()))
        return total


def _add(total: Stats, part: Stats, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(part, name))


_LOADS: dict[str, Loads] = {}


def loads_of(deployment: str) -> Loads:
    """Those of this process: the router fills them, and metrics read them."""
    return _LOADS.setdefault(deployment, Loads())
