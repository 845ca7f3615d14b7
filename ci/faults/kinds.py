"""The faults that a server is to outlive, and what each may do to the requests that run meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from server.harness import Live

from faults import clients

CLOCK = Path(__file__).with_name("clock.c")
JUMPS = (3600, -3600, 400 * 86400, -400 * 86400, 0)  # seconds from the true time


@dataclass
class Place:
    """A running server and what a fault may need to know of it."""

    live: Live
    model: Path  # the folder it serves
    scratch: Path
    number: int = 0  # of the time that the fault is done, from 0


Act = Callable[[Place], None]


@dataclass(frozen=True)
class Fault:
    text: str
    act: Act
    codes: frozenset[str] = frozenset()  # errors that it may end running requests with
    restarts: bool = False  # the engine is another one afterwards
    flags: tuple[str, ...] = ()  # of the server


def kill(place: Place) -> None:
    os.kill(place.live.engines()[0], signal.SIGKILL)


def stall(place: Place) -> None:
    """A process that is stopped stands for a device that does not answer."""
    os.kill(place.live.engines()[0], signal.SIGSTOP)


def post(place: Place, body: dict[str, str]) -> httpx.Response:
    """Ask for a reload, which takes as long as a start."""
    return httpx.post(place.live.url + "/v1/models/lm/reload", json=body, timeout=600, verify=False)


def reload(place: Place) -> None:
    answer = post(place, {})
    assert answer.status_code == 200, answer.text


def corrupt(place: Place) -> None:
    """A reload from a checkpoint that is damaged, in one of several ways."""
    folder = place.scratch / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.model, folder)
    damage = DAMAGES[place.number % len(DAMAGES)]
    damage(folder / "model.safetensors")
    answer = post(place, {"checkpoint": str(folder)})
    assert answer.status_code == 400, f"{damage.__name__}: {answer.text}"


def cut_short(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_tensors(weights: Path) -> None:
    weights.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")


def garbage(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[8:200] = os.urandom(192)
    weights.write_bytes(data)


def length_of_header(weights: Path) -> None:
    weights.write_bytes(struct.pack("<Q", 1 << 60) + weights.read_bytes()[8:])


def empty(weights: Path) -> None:
    weights.write_bytes(b"")


def missing(weights: Path) -> None:
    weights.unlink()


DAMAGES = (cut_short, no_tensors, garbage, length_of_header, empty, missing)


def in_turn(*what: Callable[[Live], None]) -> Act:
    return lambda place: what[place.number % len(what)](place.live)


def jump(place: Place) -> None:
    """The wall clock goes forward or back; answers carry the new time, which shows that it did."""
    ahead = JUMPS[place.number % len(JUMPS)]
    set_clock(place.scratch, ahead)
    asked = {"model": "lm", "prompt": "a", "max_tokens": 1}
    created = place.live.post("/v1/completions", asked).json()["created"]
    assert abs(created - time.time() - ahead) < 100, f"the server's clock is {created - time.time():.0f} s ahead"


def set_clock(scratch: Path, ahead: int) -> None:
    with (scratch / "clock").open("r+b") as file:
        file.write(struct.pack("<q", ahead))


def clock_environment(scratch: Path) -> dict[str, str]:
    """Build what moves a process's clock, and return the variables that it starts with."""
    library, told = scratch / "clock.so", scratch / "clock"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, CLOCK], check=True)
    told.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(told)}


IMPATIENT = ("--read-timeout", str(clients.LIMIT), "--write-timeout", str(clients.LIMIT))
LATE = frozenset({"request_timeout"})  # on a busy machine, of any client where the server is impatient
KILLED, STALLED = frozenset({"engine_dead"}), frozenset({"step_stalled"})

FAULTS: dict[str, Fault] = {
    "kill": Fault("kill -9 of the engine", kill, KILLED, restarts=True),
    "stall": Fault("a step that does not end", stall, STALLED, restarts=True),
    "reload": Fault("reload", reload),
    "corrupt": Fault("reload of a damaged checkpoint", corrupt),
    "leave": Fault(
        "clients leave",
        in_turn(clients.leave_stream, clients.leave_before_the_answer, clients.leave_in_the_prompt),
    ),
    "half-open": Fault(
        "clients fall silent, half-open",
        in_turn(clients.silent_in_the_headers, clients.silent_in_the_body, clients.silent_in_the_answer),
        LATE,
        flags=IMPATIENT,
    ),
    "slow": Fault(
        "slow clients",
        in_turn(clients.slow_to_send, clients.slow_to_read, clients.slow_but_steady),
        LATE,
        flags=IMPATIENT,
    ),
    "clock": Fault("the clock jumps", jump),
}
