"""Runs of a simulation: one point, and the least number of engines that keeps the limits."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anycore.bench.latencies import Slo
from anycore.simulate import load
from anycore.simulate.arrivals import Conversation
from anycore.simulate.engine import Settings
from anycore.simulate.fleet import Fleet, Outcomes
from anycore.simulate.measured import FrontTimes
from anycore.simulate.report import summarize
from anycore.simulate.steptime import StepTime

MOST_REPLICAS = 1024


@dataclass(frozen=True)
class Point:
    """What is simulated: requests, engines, and by what they are judged."""

    requests: Iterable[Conversation]
    settings: Settings
    step_time: Callable[[int], StepTime]  # of a replica by its number
    about: dict[str, Any]  # goes into the row as it is
    slo: Slo
    replicas: int = 1
    front: FrontTimes | None = None  # what its fronts are busy with; None: they take no time
    fronts: int = 1
    delay: float = 0.0  # seconds that pass for each request beside that
    max_concurrency: int | None = None
    price: float | None = None  # of a device and hour
    ranks: int = 1  # devices of an engine

    def run(self, replicas: int | None = None) -> dict[str, Any]:
        """Simulate it; return the figures."""
        count = replicas or self.replicas
        found = self._outcomes(count, self.front)
        limits = self.settings.limits
        figures = summarize(found, self.slo, (limits.blocks - 1) * limits.block_size, self.price, self.ranks)
        if self.front is not None and len(found.end):
            free = self._outcomes(count, None) if load.is_limit(found) else found
            figures |= load.figures(found, free, self.front)
        row = self.about | {"max_concurrency": self.max_concurrency, "goodput": self.slo} | figures
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}

    def _outcomes(self, replicas: int, front: FrontTimes | None) -> Outcomes:
        step_times = [self.step_time(number) for number in range(replicas)]
        fleet = Fleet(self.settings, step_times, front, self.fronts, self.delay, self.max_concurrency)
        gc.disable()  # nothing here is in a circle, and looking for one through a million requests takes its time
        try:
            return fleet.run(self.requests)
        finally:
            gc.enable()


def fewest(point: Point, share: float, most: int = MOST_REPLICAS) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The figures with the least number of engines by which at least `share` of all requests are within the limits.

    Doubles their number until that is so, then halves the interval. Returns None where `most` do not do it, or where
    twice as many no longer change anything; and the figures of all that was tried.
    """
    tried: dict[int, dict[str, Any]] = {}

    def attained(replicas: int) -> float:
        if replicas not in tried:
            tried[replicas] = point.run(replicas)
        return float(tried[replicas].get("attained", 0.0))

    low, high, before = 0, 1, -math.inf
    while attained(high) < share:
        idle = tried[high].get("max_waiting", 1) == 0
        if high >= most or (idle and attained(high) <= before):
            return None, list(tried.values())
        low, before, high = high, attained(high), min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attained(middle) >= share else (middle, high)
    return tried[high], list(tried.values())
