"""Runs anycore beside its peers in one sitting, taking turns, and prints the medians and their ratio.

    python ci/bench/compare.py --generate MODEL --embed MODEL [--rerank MODEL] [--dtype bfloat16] [--rounds 3]

Turns matter: a machine's memory bandwidth and its neighbours change from minute to minute, and hit both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PEERS = Path(__file__).with_name("peers.py")
WORKLOADS = {
    "generate": ("transformers", "G1,G2,G3"),
    "embed": ("sentence-transformers", "E1,E2"),
    "rerank": ("sentence-transformers", "R1"),
}
HEADLINE = {"G": "out_tok_s", "E1": "texts_s", "E2": "p50_ms", "R": "docs_s"}
"""The number a workload is judged by; of milliseconds the fewer the better."""

Results = dict[str, list[dict[str, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for task in WORKLOADS:
        parser.add_argument(f"--{task}", metavar="MODEL", help=f"model to {task} with")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ours", default="", help="further flags of anycore, such as '--quantization w8a8'")
    parser.add_argument("--peer", help="another peer than the usual one (peers.py lists them)")
    parser.add_argument("--peer-model", help="its model, where that is another file")
    parser.add_argument("--peer-dtype", help="its type, where that has another name")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python of its environment")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (default: 3)")
    parser.add_argument("--only", help="comma-separated workloads (default: all of the tasks given)")
    parser.add_argument("--log", type=Path, help="append every JSON line to this file")
    options = parser.parse_args()
    ahead = True
    for task, (peer, names) in WORKLOADS.items():
        model = getattr(options, task)
        chosen = [name for name in names.split(",") if not options.only or name in options.only.split(",")]
        for name in chosen if model else []:
            ours, theirs = alternate(options.peer or peer, model, name, options)
            ahead &= report(options.peer or peer, options.ours or options.dtype, ours, theirs)
    return 0 if ahead else 1


def alternate(peer: str, model: str, name: str, options: argparse.Namespace) -> tuple[Results, Results]:
    """Let both engines run one workload in turns, each in a fresh process."""
    shared = ["--workload", name, "--runs", "1"]
    mine = [model, *shared, "--dtype", options.dtype, *options.ours.split()]
    other = [peer, options.peer_model or model, *shared, "--dtype", options.peer_dtype or options.dtype]
    ours: Results = defaultdict(list)
    theirs: Results = defaultdict(list)
    for _ in range(options.rounds):
        for found, command in (
            (ours, [sys.executable, "-m", "anycore.cli.main", "bench", "offline", *mine]),
            (theirs, [options.peer_python, str(PEERS), *other]),
        ):
            quiet = os.environ | {"ANYCORE_LOG": "error", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=quiet)
            for line in done.stdout.splitlines():
                row = json.loads(line)
                found[row["workload"]].append(row)
                if options.log:
                    with options.log.open("a") as file:
                        file.write(json.dumps(row | {"load": os.getloadavg()[0]}) + "\n")
    return ours, theirs


def report(peer: str, dtype: str, ours: Results, theirs: Results) -> bool:
    """Print one line a workload and say whether anycore is ahead in all of them."""
    ahead = True
    for name in ours:
        number = next(field for start, field in HEADLINE.items() if name.startswith(start))
        mine, other = ([row[number] for row in found[name]] for found in (ours, theirs))
        a, b = statistics.median(mine), statistics.median(other)
        ratio = b / a if number.endswith("_ms") else a / b
        spread = f"{min(mine):.4g}-{max(mine):.4g} against {min(other):.4g}-{max(other):.4g}"
        line = f"{name:9} {dtype:9} {number:10} anycore {a:9.4g}  {peer} {b:9.4g}  {ratio:5.2f}x  ({spread})"
        print(line, flush=True)
        ahead &= ratio > 1
    return ahead


if __name__ == "__main__":
    sys.exit(main())
