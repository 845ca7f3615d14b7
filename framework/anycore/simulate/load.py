"""How much fronts have to do in a simulated run, and how many of them that takes."""

from __future__ import annotations

import math
from typing import Any

from anycore.simulate.fleet import Outcomes
from anycore.simulate.measured import FrontTimes

MOST_BUSY = 0.8
"""Share of the time that a front may be busy: above it, what comes waits, and tokens come several at a time."""
LEAST_LEFT = 0.2
"""Of that share is left for requests and tokens however often a front is woken: who is late is woken less often."""


def is_limit(found: Outcomes) -> bool:
    """Whether the busiest front has too much to do."""
    return _busiest(found) > MOST_BUSY


def figures(found: Outcomes, free: Outcomes, times: FrontTimes) -> dict[str, Any]:
    """What the fronts did, and how many the load takes.

    Args:
        free: what the engines do under the same load where fronts take no time, or `found` itself.
    """
    busiest = _busiest(found)
    tokens, chunks = (sum(getattr(front, name) for front in found.fronts) for name in ("tokens", "chunks"))
    seconds = _duration(free)
    written = sum(free.output)
    work = times.work(len(free.end), sum(free.prompt), written, written) / seconds
    wakes = times.wake * max(len(seen.ends) for seen in free.engines) * len(free.engines) / seconds
    needed = max(1, math.ceil(work / max(LEAST_LEFT, MOST_BUSY - wakes))) if work else 0
    return {
        "fronts": len(found.fronts),
        "front_busy": busiest,
        "front_limits": busiest > MOST_BUSY,
        "tokens_per_chunk": tokens / max(1, chunks),
        "fronts_needed": needed,
        "output_throughput_of_engines": written / seconds,
    }


def _busiest(found: Outcomes) -> float:
    if not len(found.end):
        return 0.0
    return max((front.busy for front in found.fronts), default=0.0) / _duration(found)


def _duration(found: Outcomes) -> float:
    return max(max(found.end) - min(found.sent), 1e-9)
