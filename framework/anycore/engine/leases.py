"""Memory that processes on one device have planned and not taken yet: two that start together must not both take it.

A file a device, in the user's runtime folder, lists who is starting and how much is still to come. An entry ends with
its start; those of dead processes are dropped by whoever reads the file next.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from anycore.config import cache_dir
from anycore.engine.memory import MemoryPlan, size
from anycore.errors import DoesNotFit

WAIT_SECONDS = 600.0
"""So long another process may take to start; then what it has reserved counts as used."""
POLL_SECONDS = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    pid: int
    started: float  # of the process: numbers are given out again
    bytes: int  # still to be taken
    number: int  # of the lease within its process

    @property
    def alive(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1
        except psutil.AccessDenied:
            return True
        except psutil.Error:
            return False


class Lease:
    """One engine's part in the file, from the moment it plans until it is ready. Leaving the block ends it."""

    def __init__(self, device: str, folder: Path | None = None, wait: float = WAIT_SECONDS) -> None:
        self.path = (folder or runtime_folder()) / (re.sub(r"[^\w.-]+", "-", device) + ".leases")
        self.wait = wait
        self.mine = Entry(os.getpid(), psutil.Process().create_time(), 0, id(self))
        self.usable = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.keep(0)

    def take(
        self, plan: Callable[[int], MemoryPlan], runtime: int = 0, tell: Callable[[str], None] = log.info
    ) -> MemoryPlan:
        """Plan and reserve. `plan` is given the bytes that others have reserved, which count as used.

        Where they change the plan, wait until they are taken and show as such: the plan is then made of what is.

        Raises:
            DoesNotFit: also if nobody else were starting, or after `wait` seconds.
        """
        end = time.monotonic() + self.wait
        said = False
        while True:
            with self._others() as others:
                reserved = sum(entry.bytes for entry in others)
                made = plan(0) if not reserved else _unchanged(plan, reserved)
                if made is None and time.monotonic() >= end:
                    made = plan(reserved)
                if made is not None:
                    self._write(others, made.used - runtime)
                    return made
            if not said:
                who = ", ".join(f"process {entry.pid} ({size(entry.bytes)})" for entry in others)
                tell(f"waiting for what is starting on this device: {who}")
                said = True
            time.sleep(POLL_SECONDS)

    def keep(self, count: int) -> None:
        """So many bytes are still to be taken; 0 ends the lease."""
        with self._others() as others:
            self._write(others, count)

    @contextmanager
    def _others(self) -> Iterator[list[Entry]]:
        """Hold the file, and give the entries of all other engines that are alive."""
        file = self._open()
        if file is None:
            yield []
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, or with the process
            mine = (self.mine.pid, self.mine.number)
            yield [entry for entry in self._read() if (entry.pid, entry.number) != mine and entry.alive]

    def _open(self) -> IO[str] | None:
        """None, and a warning, where no file can be written: then two that start together may both take the memory."""
        if self.usable:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                return open(self.path, "a", encoding="utf-8")
            except OSError as error:
                self.usable = False
                log.warning("memory on this device is not reserved while this model starts: %s", error)
        return None

    def _read(self) -> list[Entry]:
        try:
            return [Entry(**entry) for entry in json.loads(self.path.read_text(encoding="utf-8") or "[]")]
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged and begun anew: %s", self.path, error)
            return []

    def _write(self, others: list[Entry], count: int) -> None:
        if not self.usable:
            return
        entries = [*others, replace(self.mine, bytes=count)] if count > 0 else others
        self.path.write_text(json.dumps([asdict(entry) for entry in entries]), encoding="utf-8")


def _unchanged(plan: Callable[[int], MemoryPlan], reserved: int) -> MemoryPlan | None:
    """The plan beside what others have reserved; None if they change it.

    Raises:
        DoesNotFit: it would not fit without them either.
    """
    alone = plan(0)
    try:
        return alone if plan(reserved) == alone else None
    except DoesNotFit:
        return None


def runtime_folder() -> Path:
    """The user's folder for such files, which a restart of the machine empties; else beside the caches."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) / "anycore" if folder and os.access(folder, os.W_OK) else cache_dir() / "run"
