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
    """Logs the start and the end of each phase, and in between at most one line in a few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: dict[str, float] = {}
        self._last = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        now = self._clock()
        first = phase not in self._started
        started = self._started.setdefault(phase, now)
        if fraction >= 1:
            del self._started[phase]
            log.info("%s: done in %.1f s", phase, now - started)
        elif first or now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            log.info("%s: %d %%", phase, fraction * 100)


class Bars:
    """Draws a bar for each phase while any is unfinished; nothing is drawn, and nothing refreshed, in between."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, fraction: float) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase.replace("[", r"\["), total=1.0)
            self._start()
        self._progress.update(self._tasks[phase], completed=min(fraction, 1.0))
        if fraction >= 1:
            self._progress.remove_task(self._tasks.pop(phase))
            if not self._tasks:
                self.stop()

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
