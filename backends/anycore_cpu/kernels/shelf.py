"""Where packed matrices of float32 lie: side by side in memory whose pages are of 2 MiB, if the system gives such.

A step reads each weight once, so that with pages of 4 KiB it looks up the place of one after every 64 cache lines.
Types with fewer bytes gain a few percent by it, and would pay half a second of start for memory that is new.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

BOARD = 64 << 20
"""Bytes of address space that are taken at a time; the system gives memory where something is written."""

LEAST = 128 << 10
"""Bytes of a matrix that is put there: for tiny ones a page of 2 MiB would be too much."""

ALIGNED = 64


class Shelf:
    """Matrices of one backend. A board is given back when all that lay on it are gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._board: mmap.mmap | None = None
        self._used = 0

    @property
    def is_used(self) -> bool:
        return self._board is not None

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """As `torch.empty(count)`."""
        size = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(count, dtype=dtype)
        with self._lock:
            if self._board is None or self._used + size > len(self._board):
                self._board, self._used = board(max(size, BOARD)), 0
            start, self._used = self._used, self._used + size
            return torch.frombuffer(self._board, dtype=dtype, count=count, offset=start)


def board(size: int) -> mmap.mmap:
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without such pages
        made.madvise(mmap.MADV_HUGEPAGE)
    return made
