"""What each key has used, in memory that all fronts of a server share: limits hold for the server, not for each front.

A bucket is a level that fills by what is used and runs dry at a minute's allowance a minute. So an empty bucket is 0,
a key that was never seen needs no entry, and a changed limit holds at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LEDGER = "limits"  # name of the file in the server's folder
SLOTS = 4096  # names of keys that one run of the server may see, reloads included
NAME_BYTES = 32
REQUESTS, TOKENS = 0, 1  # buckets
_BUCKET = struct.Struct("=dd")  # level, and when it was that
_COUNT = struct.Struct("=q")


class Ledger:
    """Levels and counts by the name of a key. Times are of the monotonic clock, which processes share.

    Args:
        path: a file that all fronts open; None for a server with one.
        front: this process's number; what an earlier process of this number had under way is forgotten.
    """

    def __init__(self, path: Path | None = None, front: int = 0, fronts: int = 1) -> None:
        self._front = front
        self._fronts = fronts
        self._size = NAME_BYTES + 2 * _BUCKET.size + fronts * _COUNT.size
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, SLOTS * self._size)
        self._memory = mmap.mmap(self._file, SLOTS * self._size)
        with self._alone():
            for slot in range(SLOTS):
                _COUNT.pack_into(self._memory, self._count_at(slot * self._size, front), 0)

    def take(self, name: str, bucket: int, amount: float, allowance: float, now: float) -> float:
        """Use `amount` if it fits into a minute's `allowance`; else use nothing and return in how many seconds it will.

        An amount above the allowance never fits: the caller refuses it.
        """
        with self._alone():
            at = self._slot(name) + NAME_BYTES + bucket * _BUCKET.size
            level = self._level(at, allowance, now)
            over = level + amount - allowance
            if over > 0:
                return over * 60 / allowance
            _BUCKET.pack_into(self._memory, at, level + amount, now)
            return 0.0

    def use(self, name: str, bucket: int, amount: float, allowance: float, now: float) -> None:
        """Use what cannot be refused any more (give back what is negative); what is over is waited for later."""
        with self._alone():
            at = self._slot(name) + NAME_BYTES + bucket * _BUCKET.size
            level = max(0.0, self._level(at, allowance, now) + amount)
            _BUCKET.pack_into(self._memory, at, level, now)

    def enter(self, name: str, most: int) -> bool:
        """Count a request as under way, if fewer than `most` are."""
        with self._alone():
            slot = self._slot(name)
            if sum(self._count(slot, front) for front in range(self._fronts)) >= most:
                return False
            self._add(slot, 1)
            return True

    def leave(self, name: str) -> None:
        with self._alone():
            self._add(self._slot(name), -1)

    def _level(self, at: int, allowance: float, now: float) -> float:
        level, then = _BUCKET.unpack_from(self._memory, at)
        return float(max(0.0, level - (now - then) * allowance / 60))

    def _count_at(self, slot: int, front: int) -> int:
        return slot + NAME_BYTES + 2 * _BUCKET.size + front * _COUNT.size

    def _count(self, slot: int, front: int) -> int:
        return int(_COUNT.unpack_from(self._memory, self._count_at(slot, front))[0])

    def _add(self, slot: int, number: int) -> None:
        count = self._count(slot, self._front) + number
        _COUNT.pack_into(self._memory, self._count_at(slot, self._front), count)

    def _slot(self, name: str) -> int:
        """Find where a name is kept, or make it a place; the lock is held."""
        digest = hashlib.sha256(name.encode()).digest()
        first = int.from_bytes(digest[:4], "little")
        for i in range(SLOTS):
            at = (first + i) % SLOTS * self._size
            found = self._memory[at : at + NAME_BYTES]
            if found == digest:
                return at
            if found == bytes(NAME_BYTES):
                self._memory[at : at + NAME_BYTES] = digest
                return at
        raise RuntimeError(f"more than {SLOTS} names of keys since the server started")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other fronts away; for microseconds. A process that dies lets go."""
        if self._file < 0:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
