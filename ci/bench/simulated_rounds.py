"""Both sides of `simulated.py`: what a server does under a workload, and what `anycore simulate` predicts for it."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from anycore.cli.flags import Parser, add_flags
from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.launch import build, prepare
from anycore.engine.request import NewRequest, SamplingParams
from anycore.plugins import load
from anycore.simulate.engine import Seen
from anycore.simulate.fleet import Outcomes
from anycore.simulate.measure import Meter, record, turn
from anycore.simulate.report import summarize

ANYCORE = (sys.executable, "-m", "anycore.cli.main")
READY_SECONDS = 600.0
DRAWS = 3
"""Predictions of one run, each with other irregularities of steps: their median is compared."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Requests to make, in shares of what the engine can do at most."""

    name: str
    share: float | None  # of the most requests a second; None: a fixed number is open all the time
    burstiness: float = 1.0
    prefix: float = 0.0  # share of a prompt that it has in common with others
    concurrency: int | None = None


WORKLOADS = (
    Workload("poisson", 0.5),
    Workload("bursts, shared prefixes", 0.5, burstiness=0.4, prefix=0.5),
    Workload("closed loop", None, concurrency=8),
)
SINGLE, SINGLES = Workload("single", None, concurrency=1), 48
"""Requests one at a time, for what a request takes outside of the engine; and how many."""


def anycore(*words: str) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run([*ANYCORE, *words], capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise SystemExit(f"anycore {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def server(model: str, flags: Sequence[str], log: Path) -> Iterator[str]:
    """A server's base URL, once it is ready."""
    command = [*ANYCORE, "serve", model, *flags, "--port", "0", "--served-model-name", "m"]
    with log.open("a") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("anycore: http"):
                raise SystemExit(f"the server did not start, see {log}")
            url = line.split()[1]
            end = time.monotonic() + READY_SECONDS
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not become ready, see {log}")
                time.sleep(0.2)
            yield f"{url}/v1"
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# --- workloads ----------------------------------------------------------------------------------------------------


def write(path: Path, work: Workload, count: int, rate: float, options: argparse.Namespace, seed: int) -> None:
    """A workload as a file that both sides read. Prompts are random ids."""
    rng = random.Random(f"{seed} {work.name}")
    low, high = options.input_len
    outputs = (4, 4) if work is SINGLE else options.output_len
    shared = [ids(rng, options, int(work.prefix * high)) for _ in range(4)]
    gaps = [rng.gammavariate(work.burstiness, 1.0) if work.share else 0.0 for _ in range(count)]
    scale = count / (work.share * rate) / sum(gaps) if work.share else 0.0
    at = 0.0
    with path.open("w") as file:
        for gap in gaps:
            at += gap * scale
            prompt = [*rng.choice(shared), *ids(rng, options, rng.randint(low, high))][: max(high, 1)]
            row = {"at": round(at, 6), "prompt": prompt, "max_tokens": rng.randint(*outputs)}
            file.write(json.dumps(row) + "\n")


def ids(rng: random.Random, options: argparse.Namespace, count: int) -> list[int]:
    return [rng.randrange(100, options.vocab_size) for _ in range(count)]


def at_once(work: Workload) -> tuple[str, ...]:
    return () if work.concurrency is None else ("--max-concurrency", str(work.concurrency))


def span(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


# --- both sides ---------------------------------------------------------------------------------------------------


class Round:
    """Steps measured before and after a server was, and all that is predicted from them.

    So a device that becomes slower or faster meanwhile is met halfway.
    """

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.out / f"round{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps = self.folder / "steps.json"
        self.steps.unlink(missing_ok=True)
        self.delay_ms = 0.0
        self._url = ""
        self.measure_steps()

    def measure_steps(self) -> None:
        """Measure them, beside those that were measured before."""
        found = json.loads(self.steps_found())
        if self.steps.exists():
            before = json.loads(self.steps.read_text())
            found["steps"] += before["steps"]
            if found.get("front"):  # other processes make it look slower, never faster
                found["front"] = min(found["front"], before["front"], key=lambda one: one["wake"] + 8 * one["chunk"])
        self.steps.write_text(json.dumps(found))

    def steps_found(self) -> str:
        seconds = str(self.options.seconds)
        return anycore("bench", "kernels", self.options.model, "--steps", "--seconds", seconds, *self.options.flags)

    @contextmanager
    def served(self) -> Iterator[None]:
        """What is measured, as long as it is open."""
        log = self.options.out / "server.log"
        with server(self.options.model, [*self.options.flags, *self._fronts()], log) as self._url:
            yield

    @property
    def front(self) -> str:
        """What the front is busy with, in words."""
        found = json.loads(self.steps.read_text()).get("front") or {}
        return "front " + (", ".join(f"{name} {1e6 * value:.1f} us" for name, value in found.items()) or "not measured")

    def _fronts(self) -> list[str]:
        return ["--api-servers", str(self.options.fronts)]

    def _front_flags(self) -> list[str]:
        """What fronts wait for each piece, where they do, beside what was measured."""
        more = self.options.piece_us
        if not more:
            return self._fronts()
        found = json.loads(self.steps.read_text())["front"]
        return [*self._fronts(), "--front-us", str(1e6 * (found["chunk"] + found["token"]) + more)]

    def path(self, work: Workload) -> Path:
        return self.folder / f"{work.name.replace(', ', '-').replace(' ', '-')}.jsonl"

    def write(self, work: Workload, count: int, rate: float, seed: int) -> None:
        write(self.path(work), work, count, rate, self.options, seed)

    def most(self) -> float:
        """Requests a second when all come at once."""
        lengths = ("--input-len", span(self.options.input_len), "--output-len", span(self.options.output_len))
        return float(self._simulate("--num-prompts", "400", *lengths)["request_throughput"])

    def calibrate(self, measured: Row) -> None:
        """Take what single requests took beyond what is predicted for a delay of each."""
        self.delay_ms = max(0.0, measured["median_ttft_ms"] - self.predict(SINGLE)["median_ttft_ms"])

    def predict(self, work: Workload) -> Row:
        """The medians of a few predictions."""
        words = ("--workload", str(self.path(work)), *at_once(work), "--seed")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rows = list(pool.map(lambda seed: self._simulate(*words, str(seed)), range(DRAWS)))
        return {
            name: statistics.median(row[name] for row in rows)
            for name, value in rows[0].items()
            if isinstance(value, int | float)
        }

    def _simulate(self, *words: str) -> Row:
        found = anycore("simulate", self.options.model, "--step-times", str(self.steps), "--format", "json",
                        "--delay-ms", str(self.delay_ms), *self._front_flags(),
                        *words, *self.options.simulated)  # fmt: skip
        row: Row = json.loads(found)["points"][0]
        return row

    def measure(self, work: Workload) -> Row:
        found = anycore("bench", "serve", "--url", self._url, "--model", "m", "--workload", str(self.path(work)),
                        "--json", "-", "--extra-body", self.options.extra_body, *at_once(work))  # fmt: skip
        row: Row = json.loads(found)
        if row["failed"]:
            raise SystemExit(f"{row['failed']} requests failed: {row['first_error']}")
        return row


class Here(Round):
    """A round whose engine is in this process, under a clock of its time on a core."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        parser = Parser(prog="simulated", description=None)
        add_flags(parser, "model", ModelConfig, skip=["model"])
        self.prepared = prepare(ModelConfig(model=options.model, **vars(parser.read(options.flags))), load())
        self.engine = build(self.prepared)
        self.sampling = SamplingParams(max_tokens=None, ignore_eos=True)
        super().__init__(number, options)

    def steps_found(self) -> str:
        runner = self.engine.runner
        steps = Meter(self.engine, self.sampling, self.options.seconds, time.process_time).run()
        self.engine.runner = runner
        return msgspec.json.encode(record(self.prepared, self.engine, self.sampling, steps)).decode()

    @contextmanager
    def served(self) -> Iterator[None]:
        yield

    def measure(self, work: Workload) -> Row:
        rows = deque(json.loads(line) for line in self.path(work).read_text().splitlines())
        engine, found, seen, concurrency = self.engine, Outcomes(), Seen(), work.concurrency
        engine.reset_prefix_cache()
        moments: dict[str, list[float]] = {}  # of a request: sent, then each of its tokens
        began, skipped = time.process_time(), 0.0
        free = deque([0.0] * (concurrency or 0))  # when places of conversations became free
        ended: list[float] = []  # by the last step: an answer is on its way while the next one is computed

        def now() -> float:
            return time.process_time() - began + skipped

        while rows or engine.has_work():
            while rows and rows[0]["at"] <= now() and (concurrency is None or free):
                row = rows.popleft()
                name = str(len(rows))
                moments[name] = [free.popleft() if concurrency else row["at"]]
                sampling = SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True)
                new = NewRequest(id=name, task=Task.GENERATE, token_ids=row["prompt"], sampling=sampling)
                engine.add(new)
            if not engine.has_work():
                skipped += max(0.0, rows[0]["at"] - now())
                free, ended = deque([*free, *ended]), []
                continue
            deltas = turn(engine)
            at = now()
            free, ended = deque([*free, *ended]), []
            for delta in deltas:
                moments[delta.id].append(at)
                if delta.finish:
                    ended += [at] if concurrency else []
                    sent, first, *rest = moments.pop(delta.id)
                    found.sent.append(sent)
                    found.first.append(first)
                    found.end.append(at)
                    found.prompt.append(1)
                    found.output.append(1 + len(rest))
                    gaps = [later - earlier for earlier, later in pairwise([first, *rest])]
                    found.longest.append(max(gaps, default=0.0))
                    seen.gaps += gaps
        seen.ends.append(now())
        seen.steady.append(0)
        found.engines = [seen]
        return summarize(found, {}, 0)
