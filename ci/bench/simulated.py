"""Predicted against measured: `anycore simulate` beside a server under `anycore bench serve`, on three workloads.

    python ci/bench/simulated.py MODEL --out FOLDER -- --backend cpu --dtype float32 --threads 1 --max-num-seqs 16 ...

What follows `--` are flags of the model, which measuring, serving and simulating get alike. Each round measures steps
anew, starts a server, and runs the workloads on it; what is predicted for a round comes from its own steps. Rates are
shares of the requests a second that the simulation says are the most. Printed are medians of the rounds; the exit code
is 1 where one of the compared figures is further off than --bar. FOLDER keeps step times, workloads and all figures.

With --here the engine runs in this process, without HTTP, and time is this process's time on a core: other processes
then count little. That is for backends that compute on the host, with --threads 1.

With --paced the device is one that only waits (paced.py): what is compared then is all but the device.

"front" is what a request takes outside of the engine: the time to the first token of requests that come one at a time,
less what is predicted for it.
"""

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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import paced

from anycore.cli.flags import Parser, add_flags
from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.launch import build, prepare
from anycore.engine.request import NewRequest, SamplingParams
from anycore.plugins import load
from anycore.simulate.engine import Seen
from anycore.simulate.fleet import Outcomes
from anycore.simulate.measure import Meter, record
from anycore.simulate.report import summarize

ANYCORE = (sys.executable, "-m", "anycore.cli.main")
COMPARED = ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")
SHOWN = (*COMPARED, "median_ttft_ms", "median_itl_ms", "median_e2el_ms", "mean_e2el_ms")
READY_SECONDS = 600.0

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


def write(path: Path, work: Workload, rate: float, options: argparse.Namespace, seed: int) -> None:
    """A workload as a file that both sides read. Prompts are random ids."""
    rng = random.Random(f"{seed} {work.name}")
    low, high = options.input_len
    shared = [ids(rng, options, int(work.prefix * high)) for _ in range(4)]
    gaps = [rng.gammavariate(work.burstiness, 1.0) if work.share else 0.0 for _ in range(options.num_prompts)]
    scale = options.num_prompts / rate / sum(gaps) if work.share else 0.0
    at = 0.0
    with path.open("w") as file:
        for gap in gaps:
            at += gap * scale
            prompt = [*rng.choice(shared), *ids(rng, options, rng.randint(low, high))][: max(high, 1)]
            row = {"at": round(at, 6), "prompt": prompt, "max_tokens": rng.randint(*options.output_len)}
            file.write(json.dumps(row) + "\n")


def ids(rng: random.Random, options: argparse.Namespace, count: int) -> list[int]:
    return [rng.randrange(100, options.vocab_size) for _ in range(count)]


# --- both sides ---------------------------------------------------------------------------------------------------


class Round:
    """One measurement of steps, and all that is predicted from it."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.out / f"round{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps = self.folder / "steps.json"
        self.steps.write_text(self.steps_found())
        self.front_ms = 0.0
        self._url = ""

    def steps_found(self) -> str:
        seconds = str(self.options.seconds)
        return anycore("bench", "kernels", self.options.model, "--steps", "--seconds", seconds, *self.options.flags)

    @contextmanager
    def served(self) -> Iterator[None]:
        """What is measured, as long as it is open."""
        with server(self.options.model, self.options.flags, self.options.out / "server.log") as self._url:
            self._calibrate()
            yield

    def predict(self, *words: str) -> Row:
        found = anycore("simulate", self.options.model, "--step-times", str(self.steps), "--format", "json",
                        "--front-ms", str(self.front_ms), *words, *self.options.simulated)  # fmt: skip
        row: Row = json.loads(found)["points"][0]
        return row

    def most(self) -> float:
        """Requests a second when all come at once."""
        lengths = ("--input-len", span(self.options.input_len), "--output-len", span(self.options.output_len))
        return float(self.predict("--num-prompts", "400", *lengths)["request_throughput"])

    def _calibrate(self) -> None:
        """Find what a request takes outside of the engine."""
        path = self.folder / "single.jsonl"
        write(path, Workload("single", None), 1.0, self.options_for(12), seed=99)
        measured = self.measure(path, 1)
        self.front_ms = max(0.0, measured["median_ttft_ms"] - self.compare(path, 1)["median_ttft_ms"])

    def options_for(self, count: int) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(self.options), "num_prompts": count, "output_len": (4, 4)})

    def compare(self, path: Path, concurrency: int | None) -> Row:
        return self.predict("--workload", str(path), *at_once(concurrency))

    def measure(self, path: Path, concurrency: int | None) -> Row:
        found = anycore("bench", "serve", "--url", self._url, "--model", "m", "--workload", str(path), "--json", "-",
                        "--extra-body", self.options.extra_body, *at_once(concurrency))  # fmt: skip
        row: Row = json.loads(found)
        if row["failed"]:
            raise SystemExit(f"{row['failed']} requests failed: {row['first_error']}")
        return row


class Here(Round):
    """A round whose engine is in this process, under a clock of its time on a core."""

    def steps_found(self) -> str:
        parser = Parser(prog="simulated", description=None)
        add_flags(parser, "model", ModelConfig, skip=["model"])
        self.prepared = prepare(ModelConfig(model=self.options.model, **vars(parser.read(self.options.flags))), load())
        self.engine = build(self.prepared)
        self.sampling = SamplingParams(max_tokens=None, ignore_eos=True)
        runner = self.engine.runner
        steps = Meter(self.engine, self.sampling, self.options.seconds, time.process_time).run()
        self.engine.runner = runner
        return msgspec.json.encode(record(self.prepared, self.engine, self.sampling, steps)).decode()

    @contextmanager
    def served(self) -> Iterator[None]:
        yield

    def measure(self, path: Path, concurrency: int | None) -> Row:
        rows = deque(json.loads(line) for line in path.read_text().splitlines())
        engine, found, seen = self.engine, Outcomes(), Seen()
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
            deltas = engine.step()
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


def at_once(concurrency: int | None) -> tuple[str, ...]:
    return () if concurrency is None else ("--max-concurrency", str(concurrency))


def span(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def run(options: argparse.Namespace) -> dict[str, list[tuple[Row, Row]]]:
    """All rounds: for each workload what was measured and what predicted."""
    found: dict[str, list[tuple[Row, Row]]] = {work.name: [] for work in WORKLOADS}
    rate = options.rate
    for number in range(options.rounds):
        this = (Here if options.here else Round)(number, options)
        rate = rate or this.most()
        with this.served():
            print(f"round {number}: at most {rate:.2f} requests/s, front {this.front_ms:.1f} ms", flush=True)
            for place, work in enumerate(WORKLOADS):
                path = this.folder / f"{place}.jsonl"
                write(path, work, (work.share or 0.0) * rate, options, seed=number)
                measured = this.measure(path, work.concurrency)
                predicted = this.compare(path, work.concurrency)
                found[work.name].append((measured, predicted))
                errors = (f"{name} {100 * (predicted[name] / measured[name] - 1):+.0f} %" for name in COMPARED)
                load = os.getloadavg()[0]
                print(f"  {work.name}: {', '.join(errors)}; load average {load:.1f}", flush=True)
        (options.out / "figures.json").write_text(json.dumps(found, indent=1))
    return found


def table(found: dict[str, list[tuple[Row, Row]]], bar: float) -> bool:
    """Print medians and errors; return whether all compared figures are within the bar."""
    good = True
    print(f"{'':26}{'figure':20}{'measured':>12}{'predicted':>12}{'error':>9}")
    for name, rounds in found.items():
        for figure in SHOWN:
            measured, predicted = (statistics.median(pair[side][figure] for pair in rounds) for side in (0, 1))
            error = predicted / measured - 1
            bad = figure in COMPARED and abs(error) > bar
            good &= not bad
            print(f"{name:26}{figure:20}{measured:12.2f}{predicted:12.2f}{error:9.1%}{'  !' if bad else ''}")
            name = ""
    return good


def pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--input-len", type=pair, default=(32, 256))
    parser.add_argument("--output-len", type=pair, default=(16, 64))
    parser.add_argument("--vocab-size", type=int, default=10_000, help="random ids are below this")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each kind of step")
    parser.add_argument("--rate", type=float, help="requests a second that are the most (default: as simulated)")
    parser.add_argument("--extra-body", default="{}", help="further fields of every request")
    parser.add_argument("--here", action="store_true", help="in this process, in its time on a core")
    parser.add_argument("--paced", type=float, metavar="X", help="a device that waits, X times as long as it might")
    parser.add_argument("--bar", type=float, default=0.15)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    if options.paced:
        folder = str(paced.install(options.out / "site", options.paced).resolve())
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        options.flags += ["--backend", "paced"]
    options.simulated = without(options.flags, "--threads")
    return int(not table(run(options), options.bar))


def without(flags: Sequence[str], name: str) -> list[str]:
    """Flags but for one and its value."""
    found = list(flags)
    if name in found:
        place = found.index(name)
        del found[place : place + 2]
    return found


if __name__ == "__main__":
    sys.exit(main())
