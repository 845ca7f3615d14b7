"""Shows how long work gets on: bars on a terminal, else plain log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of (phase, fraction 0 to 1) that shows phases as they come."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    bars = Bars()
    try:
        yield bars
    finally:
        bars.stop()


class Lines:
    """Logs when an activity begins and ends, and in between at most one line in a few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: dict[str, tuple[str, float]] = {}  # subject -> activity, when it began
        self._last = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        subject, activity = split(phase)
        now = self._clock()
        began = self._current.get(subject, ("", now))
        if began[0] != activity:
            self._current[subject] = (activity, now)
            self._last = now
            log.info("%s", phase)
        elif fraction >= 1:
            del self._current[subject]
            log.info("%s: done in %.1f s", phase, now - began[1])
        elif now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            log.info("%s: %d %%", phase, fraction * 100)


class Bars:
    """Draws a bar for each subject that is at work; nothing is drawn, and nothing refreshed, when none is."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, fraction: float) -> None:
        subject, _ = split(phase)
        if fraction >= 1:
            if subject in self._tasks:
                self._progress.remove_task(self._tasks.pop(subject))
            if not self._tasks:
                self.stop()
            return
        if subject not in self._tasks:
            self._tasks[subject] = self._progress.add_task(phase, total=1.0)
            self._start()
        self._progress.update(self._tasks[subject], description=phase, completed=fraction)

    def _start(self) -> None:
        self._progress.start()
        self._log_to(sys.stderr)  # rich has put a stream there that prints above the bars

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()
        self._log_to(sys.stderr)

    def _log_to(self, stream: TextIO) -> None:
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(stream)


def split(phase: str) -> tuple[str, str]:
    """Split "model: activity" into what works and what it does; a new activity ends the one before."""
    subject, _, activity = phase.rpartition(": ")
    return subject, activity
