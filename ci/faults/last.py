"""The faults that end a server: each time another one is started, asked, and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from server.harness import Live, serve_process

from faults.measure import OPTIONS, WAIT, Row
from faults.traffic import CLIENTS, Traffic
from faults.watch import left_after, port_is_free, processes

LEFT_SECONDS = 5  # that a process may outlive the one that started it
ENDING = frozenset({"shutting_down", "engine_dead"})


def front(model: Path, times: int, seconds: float) -> Row:
    """kill -9 of one of two fronts, the first one and the other in turns."""
    row = Row("kill -9 of a front, of two", allowed=ENDING, may_break=True)
    return repeat(row, times, seconds, lambda number: kill_front(row, model, number))


def terminate(model: Path, times: int, seconds: float) -> Row:
    """SIGTERM: in turns with time enough for all that runs, and with too little for any of it."""
    row = Row("SIGTERM under load", allowed=ENDING)
    return repeat(row, times, seconds, lambda number: stop(row, model, number))


def repeat(row: Row, times: int, seconds: float, once: Callable[[int], None]) -> Row:
    end = time.monotonic() + seconds
    while row.times < times and time.monotonic() < end:
        once(row.times)
        row.times += 1
        print(f"{row.text}: {row.times}", file=sys.stderr)
    return row


def kill_front(row: Row, model: Path, number: int) -> None:
    with serve_process(str(model), *OPTIONS, "--log-level", "info", "--api-servers", "2") as live:
        live.wait(lambda: "fronts share the port" in "".join(live.output), WAIT)
        everything = processes(live)
        others = [pid for pid in everything[1:] if b"server.front" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        victim = others[0] if number % 2 == 0 else everything[0]
        with_traffic(row, live, 48, lambda: os.kill(victim, signal.SIGKILL))
        row.wrong["exit as if all were well"] += live.exit_code(30) == 0
        row.orphans += len(left_after(everything, LEFT_SECONDS))
        row.wrong["port in use"] += not port_is_free(live)


def stop(row: Row, model: Path, number: int) -> None:
    limit, tokens = ("30", 48) if number % 2 == 0 else ("0.2", 450)
    with serve_process(str(model), *OPTIONS, "--shutdown-timeout", limit) as live:
        everything = processes(live)
        errors = row.ends.errors.total()
        with_traffic(row, live, tokens, lambda: live.signal(signal.SIGTERM))
        if number % 2 == 0:
            row.wrong["ended though there was time"] += row.ends.errors.total() - errors
        row.wrong["bad exit"] += live.exit_code(30) != 0
        row.orphans += len(left_after(everything, LEFT_SECONDS))
        row.wrong["port in use"] += not port_is_free(live)
        row.wrong["tracebacks in the log"] += "".join(live.output).count("Traceback")


def with_traffic(row: Row, live: Live, tokens: int, act: Callable[[], None]) -> None:
    """Do something in the middle of traffic, and go on until the server's process has ended."""
    traffic = Traffic(live, tokens)
    try:
        live.wait(lambda: traffic.ends.answered > CLIENTS, WAIT)
        act()
        live.exit_code(60)
    finally:
        row.ends.add(traffic.stop())
