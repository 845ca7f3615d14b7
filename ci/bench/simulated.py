"""Predicted against measured: `anycore simulate` beside a server under `anycore bench serve`, on three workloads.

    python ci/bench/simulated.py MODEL --out FOLDER -- --backend cpu --dtype float32 --threads 1 --max-num-seqs 16 ...

What follows `--` are flags of the model, which measuring, serving and simulating get alike. Each round measures steps,
starts a server, runs the workloads on it, and measures steps again; what is predicted for a round comes from its own
steps. Rates are shares of the requests a second that the simulation says are the most, and a workload has as many
requests as that makes in --lasting seconds. Printed are medians of the rounds; the exit code is 1 where one of the
compared figures is further off than --bar. FOLDER keeps step times, workloads and all figures.

With --here the engine runs in this process, without HTTP, and time is this process's time on a core: other processes
then count little. That is for backends that compute on the host, with --threads 1.

With --paced the device is one that only waits (paced.py): what is compared then is all but the device. With --piece-us
its fronts wait, too, before each piece of text that they send, so that they are short of time.

What the front is busy with is measured with the steps. What requests that come one at a time take to their first token
beyond what is predicted is a "delay" of each: processes that wake each other, and the client.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paced
from simulated_rounds import SINGLE, SINGLES, WORKLOADS, Here, Round, Row

COMPARED = ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")
SHOWN = (*COMPARED, "median_ttft_ms", "median_itl_ms", "median_e2el_ms", "mean_e2el_ms")
LEAST = 20
"""Requests of a workload, however short it is to be."""


def run(options: argparse.Namespace) -> dict[str, list[tuple[Row, Row]]]:
    """All rounds: for each workload what was measured and what predicted."""
    found: dict[str, list[tuple[Row, Row]]] = {work.name: [] for work in WORKLOADS}
    rate, began = options.rate, time.monotonic()
    for number in range(options.rounds):
        this = (Here if options.here else Round)(number, options)
        rate = rate or this.most()
        tell(began, f"round {number}: at most {rate:.2f} requests/s")
        with this.served():
            this.write(SINGLE, SINGLES, rate, seed=99)
            measured = {SINGLE.name: this.measure(SINGLE)}
            for work in WORKLOADS:
                this.write(work, max(LEAST, round((work.share or 1.0) * rate * options.lasting)), rate, seed=number)
                measured[work.name] = this.measure(work)
                tell(began, f"  {work.name}: measured, load average {os.getloadavg()[0]:.1f}")
            again = this.measure(SINGLE)
        if not options.once:
            this.measure_steps()
        if not options.here:
            this.calibrate(min(measured[SINGLE.name], again, key=lambda row: float(row["median_ttft_ms"])))
        tell(began, f"  {this.front}, delay {this.delay_ms:.1f} ms")
        with ThreadPoolExecutor() as pool:
            predictions = list(pool.map(this.predict, WORKLOADS))
        for work, predicted in zip(WORKLOADS, predictions, strict=True):
            real = measured[work.name]
            found[work.name].append((real, predicted))
            errors = (f"{name} {100 * (predicted[name] / real[name] - 1):+.0f} %" for name in COMPARED)
            tell(began, f"  {work.name}: {', '.join(errors)}")
        (options.out / "figures.json").write_text(json.dumps(found, indent=1))
    return found


def tell(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)


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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lasting", type=float, default=100.0, help="seconds of each workload")
    parser.add_argument("--input-len", type=pair, default=(32, 256))
    parser.add_argument("--output-len", type=pair, default=(16, 64))
    parser.add_argument("--vocab-size", type=int, default=10_000, help="random ids are below this")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each kind of step")
    parser.add_argument("--rate", type=float, help="requests a second that are the most (default: as simulated)")
    parser.add_argument("--extra-body", default="{}", help="further fields of every request")
    parser.add_argument("--here", action="store_true", help="in this process, in its time on a core")
    parser.add_argument("--paced", type=float, metavar="X", help="a device that waits, X times as long as it might")
    parser.add_argument("--piece-us", type=float, default=0.0, metavar="US", help="what its fronts wait for each piece")
    parser.add_argument("--fronts", type=int, default=1, help="front processes")
    parser.add_argument("--once", action="store_true", help="measure steps before the workloads only")
    parser.add_argument("--bar", type=float, default=0.15)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    options.flags = words[cut + 1 :]
    if options.paced:
        folder = str(paced.install(options.out / "site", options.paced, options.piece_us / 1e6).resolve())
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
