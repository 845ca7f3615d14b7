"""What torch allocates for tensors on the CPU, exactly, by its profiler: for tests of the memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """Bytes, counted from the beginning of the block."""

    peak: int = 0
    left: int = 0  # at its end


@contextmanager
def allocations() -> Iterator[Allocations]:
    found = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield found
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        found.left += event.nbytes()
        found.peak = max(found.peak, found.left)
