"""Both sides of the comparison on one machine, taking turns; one JSON line a result, appended to --out.

sitting.py offline FOLDER [--rounds 5]    # single, batch, prefill, prefix: anycore and vLLM, both alive, in turns
sitting.py parallel FOLDER --share 0.28   # on two cards: anycore of one rank and of two, vLLM of two
sitting.py pooled FOLDER [--rounds 4]     # embed or rerank: anycore, vLLM and transformers, likewise
sitting.py start FOLDER [--rounds 2]      # process start to first token, caches cold and then warm
sitting.py http FOLDER                    # servers under load: saturation, then shares of the peer's
sitting.py table FILE...                  # medians and ratios as Markdown

FOLDER is one that models.py wrote. Every engine gets --share of the card. CUDA_VISIBLE_DEVICES and --port let two run
side by side on two cards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections import defaultdict
from contextlib import ExitStack
from glob import glob
from pathlib import Path
from typing import Any

from servers import serve_both
from turns import Row, Worker, sizes

KINDS = ("single", "batch", "prefill", "prefix")
CACHES = ("~/.triton", "~/.nv", "~/.cache/vllm", "~/.cache/anycore", "~/.cache/torch*", "~/.cache/flashinfer",
          "/tmp/torchinductor_*")  # fmt: skip
PEERS = {"generate": ("vllm",), "embed": ("vllm", "transformers"), "rerank": ("vllm", "transformers")}
RATES = {"prefill": ("in_tok", "input tokens/s"), "embed": ("texts", "texts/s"), "rerank": ("pairs", "pairs/s")}
BARS = {
    ("qwen2.5-0.5b", "single"): 3.0, ("qwen2.5-7b", "single"): 1.2,
    ("qwen2.5-0.5b", "batch"): 3.0, ("qwen2.5-7b", "batch"): 1.2,
    ("qwen2.5-0.5b", "prefill"): 1.3, ("qwen2.5-7b", "prefill"): 1.0,
    ("qwen2.5-0.5b", "prefix"): 3.0, ("qwen2.5-7b", "prefix"): 1.3,
    ("qwen2.5-0.5b", "saturation"): 1.5, ("qwen2.5-7b", "saturation"): 1.1,
    ("bge-base-like", "embed"): 1.6, ("qwen3-embedding-0.6b-like", "embed"): 1.4,
    ("bge-reranker-base-like", "rerank"): 1.5,
}  # fmt: skip
"""How many times faster than the better peer anycore is to be."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("offline", "parallel", "pooled", "start", "http", "table"))
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--workloads", default=",".join(KINDS), help="offline, parallel: which of them (default: %(default)s)"
    )
    parser.add_argument("--engines", help="not pooled: which of them, by commas, as turns.Worker names them")
    parser.add_argument("--share", type=float, help="of the card, for each engine (default: 0.45; pooled: 0.3)")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--fronts", type=int, default=1, help="http: front processes of anycore")
    parser.add_argument("--peer-fronts", type=int, default=1, help="http: front processes of the peer")
    parser.add_argument("--only", help="http: saturation alone, or rates alone at so many requests/s of the peer")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "sitting.jsonl")
    options = parser.parse_args()
    if options.part == "table":
        lines = [line for path in options.folders for line in Path(path).read_text().splitlines()]
        print("\n".join(table([json.loads(line) for line in lines])))
        return
    for folder in options.folders:
        run = {"offline": offline, "parallel": parallel, "pooled": pooled, "start": start, "http": serve_both}[
            options.part
        ]
        for row in run(folder, options):
            keep(options.out, row)


def keep(out: Path, row: Row) -> None:
    line = json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print(line, flush=True)
    with out.open("a") as file:
        file.write(line + "\n")


def offline(folder: str, options: argparse.Namespace) -> Any:
    engines = (options.engines or "vllm,anycore").split(",")
    return alternate(folder, tuple(engines), "generate", tuple(options.workloads.split(",")), options)


def parallel(folder: str, options: argparse.Namespace) -> Any:
    engines = (options.engines or "vllm-tp2,anycore-tp2,anycore").split(",")
    return alternate(folder, tuple(engines), "generate", tuple(options.workloads.split(",")), options)


def pooled(folder: str, options: argparse.Namespace) -> Any:
    task = "rerank" if "rerank" in folder else "embed"
    return alternate(folder, (*PEERS[task], "anycore"), task, (task,), options)


def alternate(
    folder: str, engines: tuple[str, ...], task: str, kinds: tuple[str, ...], options: argparse.Namespace
) -> Any:
    """Start every engine once, and let them run each workload in turns; the first turn warms up."""
    share = options.share or (0.45 if task == "generate" else 0.3)
    about = {"part": "offline", "model": Path(folder).name}
    with ExitStack() as stack:
        workers = []
        for engine in engines:
            worker = Worker(engine, task, folder, share, options.out.with_name(f"{engine}.log"))
            stack.callback(worker.close)
            workers.append(worker)
            yield about | {"part": "start", "engine": engine, "caches": "as found", "seconds": worker.start_seconds}
        for kind in kinds:
            size = sizes(kind)
            for number in range(options.rounds + 1):
                for worker in workers if number % 2 else reversed(workers):
                    seconds = worker.run(kind)
                    rates = {f"{name}_s": count / seconds for name, count in size.items()}
                    row = about | {"engine": worker.engine, "workload": kind, "round": number, "seconds": seconds}
                    yield row | rates


def start(folder: str, options: argparse.Namespace) -> Any:
    """Each engine alone on the card, with no caches, then with those it made."""
    for engine in (options.engines or "anycore,vllm").split(","):
        for number in range(options.rounds):
            if not number:
                clear_caches()
            worker = Worker(engine, "generate", folder, options.share or 0.85, options.out.with_name(f"{engine}.log"))
            seconds = worker.start_seconds
            worker.close()
            caches = "warm" if number else "cold"
            yield {"part": "start", "model": Path(folder).name, "engine": engine, "caches": caches, "seconds": seconds}


def clear_caches() -> None:
    """Remove what engines keep between starts."""
    for pattern in CACHES:
        for path in glob(os.path.expanduser(pattern)):
            shutil.rmtree(path, ignore_errors=True)


# --- the table -------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    """Rates, then starts, then latencies under load: medians, spreads, and ours over the better peer's."""
    return [*rates_table(rows), "", *start_table(rows), "", *latency_table(rows)]


def rates_table(rows: list[Row]) -> list[str]:
    found: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["part"] == "offline" and row["round"]:
            name, unit = RATES.get(row["workload"], ("out_tok", "output tokens/s"))
            found[row["model"], row["workload"], unit][row["engine"]].append(row[f"{name}_s"])
        elif row["part"] == "http" and row["load"] == "saturation":
            key = row["model"], "saturation", "output tokens/s over HTTP"
            found[key][row["engine"]].append(row["output_throughput"])
    lines = ["| model | workload | unit | anycore | peer | ratio (bar) |", "|---|---|---|---|---|---|"]
    for (model, kind, unit), engines in found.items():
        ours = engines.pop("anycore-tp2", None) or engines.pop("anycore", [])
        if not ours or not engines:
            continue
        peer = max(engines, key=lambda name: statistics.median(engines[name]))
        ratio = statistics.median(ours) / statistics.median(engines[peer])
        bar = BARS.get((model, kind))
        judged = (
            f"**{ratio:.2f}** ({bar:g})" if bar and ratio < bar else f"{ratio:.2f} ({bar:g})" if bar else f"{ratio:.2f}"
        )
        others = "; ".join(f"{name} {spread(values)}" for name, values in engines.items())
        lines.append(f"| {model} | {kind} | {unit} | {spread(ours)} | {others} | {judged} |")
    return lines


def start_table(rows: list[Row]) -> list[str]:
    found: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["part"] == "start":
            found[row["model"], row.get("way", "offline"), row["caches"]][row["engine"]].append(row["seconds"])
    lines = ["| model | start | caches | anycore, s | peers, s |", "|---|---|---|---|---|"]
    for (model, way, caches), engines in found.items():
        shown = {name: ", ".join(f"{value:.1f}" for value in values) for name, values in engines.items()}
        ours = shown.pop("anycore", "-")
        peers = "; ".join(f"{name} {text}" for name, text in shown.items())
        lines.append(f"| {model} | {way} | {caches} | {ours} | {peers} |")
    return lines


def latency_table(rows: list[Row]) -> list[str]:
    names = {
        "median_ttft_ms": "TTFT p50",
        "p99_ttft_ms": "TTFT p99",
        "median_itl_ms": "ITL p50",
        "p99_itl_ms": "ITL p99",
    }
    lines = [
        f"| model | load | engine | {', ms | '.join(names.values())}, ms | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["part"] == "http":
            shown = " | ".join(f"{row[name]:.1f}" for name in names)
            lines.append(f"| {row['model']} | {row['load']} | {row['engine']} | {shown} | {row['failed']} |")
    return lines


def spread(values: list[float]) -> str:
    digits = 0 if min(values) >= 100 else 1
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


if __name__ == "__main__":
    main()
