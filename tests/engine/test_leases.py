"""Leases: processes that start together on one device do not plan with the same memory, and dead ones do not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine.example import GIB, QWEN, WISH

from anycore.engine.leases import Lease, runtime_folder
from anycore.engine.memory import MemoryPlan, Room, plan
from anycore.errors import DoesNotFit

RACE = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from engine.example import device_plan
from anycore.engine.leases import Lease
used = Path(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
with Lease("fake-0", Path(sys.argv[2])) as lease:
    made = lease.take(lambda reserved: device_plan(used, reserved))
    time.sleep(0.5)  # weights are read
    used.write_text(str(int(used.read_text()) + made.used))
print(made.used)
"""


HALF = replace(WISH, utilization=0.5, utilization_asked=True)


def half(reserved: int) -> MemoryPlan:
    """0.5 was asked for, of a device that is free but for what is reserved."""
    return plan(QWEN, HALF, Room("fake", 100 * GIB, 100 * GIB - reserved))


def most(reserved: int) -> MemoryPlan:
    """The default share."""
    return plan(QWEN, WISH, Room("fake", 100 * GIB, 100 * GIB - reserved))


def entries(folder: Path) -> list[dict[str, int]]:
    found: list[dict[str, int]] = json.loads((folder / "fake-0.leases").read_text() or "[]")
    return found


def test_two_processes_that_start_together_share_the_device(tmp_path: Path) -> None:
    """Both want 0.9 of it. Without leases both would see it free and take 90 GiB each."""
    used = tmp_path / "used"
    used.write_text("0")
    command = [sys.executable, "-c", RACE, str(used), str(tmp_path), str(Path(__file__).parent.parent)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["here\n"] * 2  # type: ignore[union-attr]
    for process in both:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    shares = sorted(int(process.communicate(timeout=60)[0]) for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert shares[0] < 10 * GIB < 60 * GIB < shares[1]
    assert sum(shares) <= 100 * GIB
    assert entries(tmp_path) == []


def test_an_entry_shrinks_and_ends(tmp_path: Path) -> None:
    with Lease("fake-0", tmp_path) as lease:
        made = lease.take(most)
        assert [entry["bytes"] for entry in entries(tmp_path)] == [made.used]
        lease.keep(made.working.total)
        assert [entry["bytes"] for entry in entries(tmp_path)] == [made.working.total]
    assert entries(tmp_path) == []


def test_an_entry_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Lease("fake-0", tmp_path) as lease:
        assert lease.take(most).used / 0
    assert entries(tmp_path) == []


@pytest.mark.parametrize("dead", ["gone", "another process has its number"])
def test_entries_of_dead_processes_do_not_count(tmp_path: Path, dead: str) -> None:
    pid, started = os.getpid(), psutil.Process().create_time() - 100
    if dead == "gone":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        pid = process.pid
    entry = {"pid": pid, "started": started, "bytes": 99 * GIB, "number": 1}
    (tmp_path / "fake-0.leases").write_text(json.dumps([entry]))
    with Lease("fake-0", tmp_path, wait=0) as lease:
        made = lease.take(most)
    assert made.used > 10 * GIB


def live_entry(folder: Path, count: int) -> Path:
    """As if another engine of this process were starting."""
    started = psutil.Process().create_time()
    path = folder / "fake-0.leases"
    path.write_text(json.dumps([{"pid": os.getpid(), "started": started, "bytes": count, "number": 1}]))
    return path


def test_what_fits_beside_others_does_not_wait(tmp_path: Path) -> None:
    live_entry(tmp_path, 40 * GIB)
    said: list[str] = []
    with Lease("fake-0", tmp_path) as lease:
        made = lease.take(half, tell=said.append)
    assert made.budget == 50 * GIB
    assert not said


def test_what_others_change_waits_and_says_so(tmp_path: Path) -> None:
    path = live_entry(tmp_path, 60 * GIB)
    said: list[str] = []
    timer = threading.Timer(0.5, path.write_text, ["[]"])
    timer.start()
    with Lease("fake-0", tmp_path) as lease:
        made = lease.take(half, tell=said.append)
    timer.join()
    assert made.budget == 50 * GIB
    assert said == [f"waiting for what is starting on this device: process {os.getpid()} (60 GiB)"]


def test_after_the_wait_what_is_reserved_counts_as_used(tmp_path: Path) -> None:
    live_entry(tmp_path, 60 * GIB)
    with Lease("fake-0", tmp_path, wait=0) as lease, pytest.raises(DoesNotFit, match="only 40 GiB of fake"):
        lease.take(half)


def test_what_does_not_fit_alone_is_refused_at_once(tmp_path: Path) -> None:
    live_entry(tmp_path, 60 * GIB)
    with Lease("fake-0", tmp_path) as lease, pytest.raises(DoesNotFit):
        lease.take(lambda reserved: plan(QWEN, WISH, Room("fake", 2 * GIB, 2 * GIB)))


def test_a_damaged_file_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "fake-0.leases").write_text("{half")
    with Lease("fake-0", tmp_path) as lease:
        lease.take(most)
        assert len(entries(tmp_path)) == 1
    assert "damaged" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with Lease("fake-0", tmp_path / "file") as lease:
        assert lease.take(most).used
    assert caplog.text.count("is not reserved while this model starts") == 1


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder() == tmp_path / "anycore"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path / "cache"))
    assert runtime_folder() == tmp_path / "cache" / "run"
