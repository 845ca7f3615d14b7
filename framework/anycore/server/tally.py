"""What the requests to one other server amount to, in memory that all fronts of ours share."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from anycore.engine.stats import Stats

FIELDS = ("running", "prompt_tokens", "cached_tokens", "output_tokens")  # each eight bytes


class Tally:
    """A row of counts for each front. A front writes its own row only, so nobody has to wait.

    Args:
        path: a file that all fronts open.
        front: this process's number; what an earlier process of this number had counted is forgotten.
    """

    def __init__(self, path: Path, front: int = 0, fronts: int = 1) -> None:
        size = 8 * len(FIELDS)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, size * fronts)
        memory = mmap.mmap(file, size * fronts)
        os.close(file)  # the memory keeps it open
        memory[size * front : size * (front + 1)] = bytes(size)
        self._counts = memoryview(memory).cast("q")
        self._first = len(FIELDS) * front

    def add(self, **numbers: int) -> None:
        """Add to this front's counts, by their names."""
        for name, number in numbers.items():
            self._counts[self._first + FIELDS.index(name)] += number

    @property
    def stats(self) -> Stats:
        """The sums over all fronts."""
        running, prompt, cached, output = (sum(self._counts[i :: len(FIELDS)]) for i in range(len(FIELDS)))
        return Stats(running=running, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
