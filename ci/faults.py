"""Faults with requests running, many times each: `ci/faults.py [FAULT ...] [--times 50]` prints a table in Markdown.

A server over a tiny random model on the CPU is asked all the time, by streams and by whole answers, while engines are
killed, stopped, reloaded, or clients leave. Every request must end: with its answer, or with an error that says why.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tiny
from server.harness import Live, serve_process

CLIENTS = 4
KNOWN = {"engine_dead", "step_stalled", "model_restarting", "model_loading"}


class Traffic:
    """Clients that ask until told to stop, and count how each request ended."""

    def __init__(self, live: Live) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self._live = live
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            self.ends["hung"] += thread.is_alive()

    def _ask(self, number: int) -> None:
        body = {"model": "lm", "prompt": "the river", "max_tokens": 48, "ignore_eos": True, "stream": number % 2 == 0}
        with httpx.Client(base_url=self._live.url, timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post("/v1/completions", json=body)
                    self.ends[ending(answer)] += 1
                    if answer.status_code != 200:
                        time.sleep(0.05)
                except httpx.HTTPError as error:
                    self.ends[f"lost ({type(error).__name__})"] += 1


def ending(answer: httpx.Response) -> str:
    """How a request ended: "answered", the code of its error, or "cut off" where it says neither."""
    text = answer.text
    if answer.status_code != 200:
        return str(answer.json()["error"]["code"])
    if "text/event-stream" not in answer.headers["content-type"]:
        return "answered"
    last = text.strip().splitlines()[-1].removeprefix("data: ")
    if last == "[DONE]":
        return "answered"
    found = json.loads(last)
    return str(found["error"]["code"]) if "error" in found else "cut off"


def kill(live: Live) -> None:
    os.kill(live.engines()[0], signal.SIGKILL)


def stall(live: Live) -> None:
    """A process that is stopped stands for a device that does not answer."""
    os.kill(live.engines()[0], signal.SIGSTOP)


def reload(live: Live) -> None:
    assert live.post("/v1/models/lm/reload").status_code == 200


def corrupt(live: Live) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        answer = live.post("/v1/models/lm/reload", {"checkpoint": folder})
        assert answer.status_code == 400, answer.text


def leave(live: Live) -> None:
    """A client goes away in the middle of a stream."""
    body = {"model": "lm", "prompt": "the river", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_text())


FAULTS: dict[str, tuple[str, Callable[[Live], None], bool]] = {
    "kill": ("kill -9 of the engine", kill, True),
    "stall": ("a step that does not end", stall, True),
    "reload": ("reload", reload, False),
    "corrupt": ("reload of a corrupt checkpoint", corrupt, False),
    "leave": ("a client leaves mid-stream", leave, False),
}
"""Name -> what it is, how it is done, and whether it may end requests with an error."""


def measure(folder: Path, name: str, times: int) -> dict[str, int]:
    """Do a fault so many times; return how the requests ended and what was left behind."""
    _, fault, ends_engine = FAULTS[name]
    options = ("--backend", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MiB", "--threads", "1")
    limits = ("--engine-restarts", str(times + 1), "--step-timeout", "5", "--log-level", "error")
    with serve_process(str(folder), "--served-model-name", "lm", *options, *limits) as live:
        traffic = Traffic(live)
        try:
            for _ in range(times):
                answered = traffic.ends["answered"]
                live.wait(lambda count=answered: traffic.ends["answered"] > count + CLIENTS, 60)  # type: ignore[misc]
                before = live.engines()
                fault(live)
                if ends_engine:
                    live.wait(lambda old=before: old[0] not in live.engines(), 60)  # type: ignore[misc]
                live.wait_ready()
        finally:
            traffic.stop()
        live.wait(lambda: len(live.engines()) == 1, 30)
        last = live.engines()
        live.wait(lambda: held(live) == 0, 10)
        traffic.ends["requests still held"] += int(held(live) > 0)
        live.signal(signal.SIGTERM)
        traffic.ends["bad exit"] += live.exit_code(30) != 0
        traffic.ends["orphans"] += sum(Path(f"/proc/{pid}").exists() for pid in last)
    traffic.ends["tracebacks in the log"] += "Traceback" in "".join(live.output)
    return dict(traffic.ends)


def held(live: Live) -> float:
    """Sequences that run or wait in the engine."""
    wanted = ("anycore:num_requests_running{", "anycore:num_requests_waiting{")
    lines = live.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args()
    if unknown := set(options.faults) - FAULTS.keys():
        parser.error(f"no such fault: {', '.join(unknown)}")
    bad = 0
    print(
        "| fault | times | answered | ended with an error that says why | lost, hung, left behind |\n"
        "|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny.tiny_lm(Path(folder))
        for name in options.faults or FAULTS:
            ends = measure(Path(folder), name, options.times)
            answered = ends.pop("answered", 0)
            allowed = KNOWN if FAULTS[name][2] else set()
            errors = {code: ends.pop(code) for code in sorted(allowed & ends.keys())}
            wrong = {what: count for what, count in ends.items() if count}
            bad += sum(wrong.values())
            told = ", ".join(f"{count} {code}" for code, count in errors.items()) or "0"
            left = ", ".join(f"{count} {what}" for what, count in wrong.items()) or "0"
            print(f"| {FAULTS[name][0]} | {options.times} | {answered} | {told} | {left} |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
