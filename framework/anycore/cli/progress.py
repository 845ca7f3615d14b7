"""Shows how long work gets on: bars on a terminal, else plain log lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def show_progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function of (phase, fraction 0 to 1) that shows phases as they come."""
    if sys.stderr.isatty():
        with _bars() as report:
            yield report
    else:
        yield Lines()


class Lines:
    """Logs the start and the end of each phase, and in between at most one line in a few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.started: dict[str, float] = {}
        self.last = 0.0

    def __call__(self, phase: str, fraction: float) -> None:
        now = self.clock()
        first = phase not in self.started
        started = self.started.setdefault(phase, now)
        if fraction >= 1:
            del self.started[phase]
            log.info("%s: done in %.1f s", phase, now - started)
        elif first or now - self.last >= SECONDS_BETWEEN_LINES:
            self.last = now
            log.info("%s: %d %%", phase, fraction * 100)


@contextmanager
def _bars() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(phase: str, fraction: float) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=1.0)
            progress.update(tasks[phase], completed=min(fraction, 1.0))

        yield report
