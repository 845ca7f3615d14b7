"""The machine's memory as the engine sees it: container limits count, and nothing has to be copied anywhere."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from anycore.contract.backend import Memory, Peak
from anycore_cpu.limits import memory_free, memory_total


class CpuMemory(Memory):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def total(self) -> int:
        return memory_total()

    def free(self) -> int:
        return memory_free()

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """The rise of the process's high-water mark; 0 where the block stayed below an earlier peak."""
        peak = Peak()
        start, earlier = psutil.Process().memory_info().rss, high_water()
        yield peak
        if high_water() > earlier:
            peak.bytes = high_water() - start

    def upload(self, host: Tensor) -> Tensor:
        return host


def high_water() -> int:
    """Most bytes this process ever had resident. macOS counts bytes, Linux KiB."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024
