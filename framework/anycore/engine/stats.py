"""What an engine counts: gauges and counters since it started, which `server/metrics.py` shows."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Bounds by which the engine counts its steps."""


class Distribution(msgspec.Struct):
    """How often a value lay up to each of some bounds and above the one before; the last count is beyond all."""

    counts: list[int]
    total: int = 0  # of the values

    def add(self, value: int, bounds: Sequence[int]) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def __add__(self, other: Distribution) -> Distribution:
        """Both together; they must be over the same bounds."""
        return Distribution([a + b for a, b in zip(self.counts, other.counts, strict=True)], self.total + other.total)


def by_bounds(bounds: Sequence[int]) -> Any:
    """Declare a field that holds an empty distribution over `bounds`."""
    return msgspec.field(default_factory=lambda: Distribution([0] * (len(bounds) + 1)))


class Stats(msgspec.Struct, kw_only=True):
    """Gauges and counters of an engine since it started. Counters never fall."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0  # of those that wait: for a prefix that another request is computing
    blocks: int = 0  # usable blocks in the pool
    blocks_free: int = 0
    steps: int = 0
    step_tokens: Distribution = by_bounds(STEP_TOKENS)  # computed in one step
    step_sequences: Distribution = by_bounds(STEP_SEQUENCES)  # of which one step computes something
    padding_tokens: int = 0  # computed beside them for nothing, as far as the backend says
    prompt_tokens: int = 0  # prompt tokens of admitted requests that were computed or cached
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    failed: int = 0
    op_fallbacks: dict[str, int] = {}

    def after(self, before: Stats) -> Stats:
        """These gauges, and counters that begin where those of an engine before ended."""
        gauges = ("running", "waiting", "deferred", "blocks", "blocks_free")
        counters = (name for name in self.__struct_fields__ if name not in (*gauges, "op_fallbacks"))
        sums = {name: getattr(self, name) + getattr(before, name) for name in counters}
        ops = Counter(before.op_fallbacks)
        ops.update(self.op_fallbacks)
        return msgspec.structs.replace(self, **sums, op_fallbacks=dict(ops))
