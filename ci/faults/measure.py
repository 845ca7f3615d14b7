"""Does a fault many times to one server with traffic, and tells what became of the requests and of the server."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from server.harness import serve_process

from faults.kinds import Fault, Place, clock_environment, jump
from faults.traffic import CLIENTS, SECONDS, Ends, Traffic
from faults.watch import blocks_free, held, left_after, processes, resident

OPTIONS = (
    *("--served-model-name", "lm", "--backend", "cpu", "--dtype", "float32", "--threads", "1"),
    *("--kv-cache-memory", "8MiB", "--log-level", "error"),
)

WAIT = 120.0  # seconds, times the harness's patience, for anything


@dataclass
class Row:
    """What is printed of a fault."""

    text: str
    times: int = 0
    ends: Ends = field(default_factory=Ends)
    allowed: frozenset[str] = frozenset()  # codes of errors that are no fault of the server
    may_break: bool = False  # whether connections may
    orphans: int = 0
    blocks: tuple[int, int] | None = None  # free before and after
    memory: tuple[float, float] | None = None  # MiB before and after
    wrong: Counter[str] = field(default_factory=Counter)  # whatever else should not be

    @property
    def bad(self) -> int:
        """How many things are not as they should be."""
        errors = sum(count for code, count in self.ends.errors.items() if code not in self.allowed)
        broken = 0 if self.may_break else self.ends.broken
        leaked = self.blocks is not None and self.blocks[0] != self.blocks[1]
        return errors + broken + self.ends.lost.total() + self.orphans + leaked + self.wrong.total()

    def line(self) -> str:
        """As a row of a table in Markdown."""
        ends = self.ends
        told = ", ".join(f"{count} `{code}`" for code, count in ends.errors.items()) or "0"
        if ends.broken:
            told += f", {ends.broken} by a broken connection"
        lost = ", ".join(f"{count} {what}" for what, count in (ends.lost + self.wrong).items()) or "0"
        blocks = "-" if self.blocks is None else "{} / {}".format(*self.blocks)
        memory = "-" if self.memory is None else "{:.0f} / {:.0f}".format(*self.memory)
        cells = self.text, self.times, ends.sent, ends.admitted, ends.answered, told, lost, self.orphans, blocks, memory
        return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| fault | times | requests sent | admitted | answered | ended with an error | lost, wrong or left behind "
    "| orphans | blocks free before / after | RSS before / after, MiB |\n|---|---|---|---|---|---|---|---|---|---|"
)


def exercise(place: Place, fault: Fault, times: int, seconds: float = 1e9) -> Row:
    """Do a fault so many times to a server, or for so many seconds, while it is asked; the server is idle afterwards.

    Raises:
        AssertionError: the server did not do what it should after the fault.
    """
    live, row, end = place.live, Row(fault.text, allowed=fault.codes), time.monotonic() + seconds
    row.blocks = blocks_free(live), 0
    memory = 0.0
    traffic = Traffic(live)
    try:
        for number in range(times):
            answered = traffic.ends.answered
            live.wait(lambda count=answered: traffic.ends.answered > count + CLIENTS, WAIT)  # type: ignore[misc]
            memory = memory or resident(processes(live))
            before = processes(live)[1:]
            place.number = number
            fault.act(place)
            if fault.restarts:
                live.wait(lambda old=before: old[0] not in live.engines(), WAIT)  # type: ignore[misc]
                row.orphans += len(left_after(before[:1], 5))
            live.wait_ready(WAIT)
            row.times += 1
            print(f"{fault.text}: {row.times}", file=sys.stderr)
            if time.monotonic() > end:
                break
        answered = traffic.ends.answered
        live.wait(lambda: traffic.ends.answered > answered + CLIENTS, WAIT)
        live.wait(lambda: len(processes(live)) <= 2, WAIT)  # a reload has two engines for a while
        row.memory = memory, resident(processes(live))
    finally:
        row.ends = traffic.stop()
    live.wait(lambda: held(live) == 0, WAIT)
    row.blocks = row.blocks[0], blocks_free(live)
    row.wrong["tracebacks in the log"] = "".join(live.output).count("Traceback")
    return row


def run(fault: Fault, model: Path, times: int, seconds: float) -> Row:
    """Start a server over a tiny model, do a fault to it, and end it."""
    limits = ("--engine-restarts", str(times + 1), "--step-timeout", "20", "--request-timeout", str(SECONDS))
    with tempfile.TemporaryDirectory() as scratch:
        env = clock_environment(Path(scratch)) if fault.act is jump else {}
        with serve_process(str(model), *OPTIONS, *limits, *fault.flags, env=env) as live:
            row = exercise(Place(live, model, Path(scratch)), fault, times, seconds)
            last = processes(live)
            live.signal(signal.SIGTERM)
            row.wrong["bad exit"] += live.exit_code(30) != 0
            row.orphans += len(left_after(last[1:], 5))
    return row
