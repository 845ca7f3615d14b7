"""Faults with requests running, many times each: `python ci/faults [FAULT ...] [--times 50]` prints a Markdown table.

A server over a tiny random model on the CPU is asked all the time, by streams and by whole answers, while engines and
fronts are killed, stopped or reloaded, while clients leave, fall silent or are slow, while the clock jumps. Every
request that was admitted must end: with its answer, which is compared, or with an error that says why. The exit code
is 1 if one did not, or if a process, a KV block or a port was left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tiny

from faults import last, measure
from faults.disk import full_disk
from faults.kinds import FAULTS

KINDS: dict[str, Callable[[Path, int, float], measure.Row]] = {
    **{name: partial(measure.run, fault) for name, fault in FAULTS.items()},
    "front": last.front,
    "sigterm": last.terminate,
    "disk": full_disk,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which a fault is not done again")
    options = parser.parse_args()
    if unknown := set(options.faults) - KINDS.keys():
        parser.error(f"no such fault: {', '.join(unknown)}")
    bad = 0
    print(measure.HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tiny.tiny_lm(Path(folder), max_positions=2048)
        for name in options.faults or KINDS:
            row = KINDS[name](Path(folder), options.times, options.seconds)
            bad += row.bad
            print(row.line(), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
