"""Signs of life between ranks, without models: who is missed is ended, and so is everybody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anycore.ranks import watch
from anycore.ranks.watch import Watch

SECONDS = 60.0
RANK = "import sys, time; from anycore.ranks.watch import Pulse; p = Pulse(sys.argv[1], 1, int(sys.argv[2]), 1.0); "
FIRST = (
    "import os, subprocess, sys, time; from anycore.ranks.watch import Watch; "
    "w = Watch(sys.argv[1], 2, {}); w.start(); "
    "subprocess.Popen([sys.executable, '-c', sys.argv[2], w.address, str(os.getpid())]); "
    "[time.sleep(0.05) for _ in iter(lambda: not w._heard, False)]; print('serves', flush=True); time.sleep(1000)"
)


@contextmanager
def watched(folder: Path, code: str) -> Iterator[tuple[Watch, subprocess.Popen[bytes]]]:
    """A rank that gives signs of life, looked after by this process."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    made = Watch(f"ipc://{folder}/beats", 2, processes, silence=1.0)
    command = [sys.executable, "-c", RANK + code, made.address, "0"]
    process = processes[1] = subprocess.Popen(command, stdout=subprocess.PIPE)
    made.start()
    try:
        yield made, process
    finally:
        made.close()
        assert process.wait(SECONDS) is not None


def test_a_rank_that_stands_still_is_missed_and_ended(tmp_path: Path) -> None:
    with watched(tmp_path, "print('here', flush=True); time.sleep(1000)") as (made, process):
        assert process.stdout is not None
        process.stdout.readline()
        while not made._heard:
            threading.Event().wait(0.05)
        made.serve()
        assert not made.lost.wait(2.5)  # it is heard of
        process.send_signal(signal.SIGSTOP)
        assert made.lost.wait(SECONDS)
        assert made.failure == "rank 1 of 2 has given no sign of life for 1 s"
        assert process.wait(SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize(("code", "how"), [("sys.exit(3)", "exit code 3"), ("import os; os.abort()", "SIGABRT")])
def test_a_rank_that_ends_is_missed_at_once(tmp_path: Path, code: str, how: str) -> None:
    with watched(tmp_path, code) as (made, _):
        assert made.lost.wait(SECONDS)
        assert "rank 1 of 2 has ended" in made.failure
        assert how in made.failure


def test_whoever_waits_for_a_lost_rank_is_ended_as_a_last_resort(tmp_path: Path) -> None:
    called = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    made = Watch(f"ipc://{tmp_path}/beats", 2, {1: process}, last_resort=called.set)
    made.start()
    assert called.wait(SECONDS)
    made.close()


def test_a_first_rank_that_stands_still_is_ended_by_the_others(tmp_path: Path) -> None:
    rank = RANK + "p.serve(); time.sleep(1000)"
    command = [sys.executable, "-c", FIRST, f"ipc://{tmp_path}/beats", rank]
    first = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"serves\n"
    first.send_signal(signal.SIGSTOP)
    assert first.wait(SECONDS) == -signal.SIGKILL


def test_limits_keep_what_is_promised() -> None:
    """A lost rank ends the group within 5 s: it is missed twice, and then there is the last resort."""
    assert watch.SILENCE + 3 * watch.BEAT + watch.LAST_RESORT < 5
