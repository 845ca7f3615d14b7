"""Measures a model in this process and prints one JSON object a workload: medians of several runs.

Decoding is greedy and never stops early, so every engine given the same workload makes the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags
from anycore.cli.settings import given
from anycore.cli.workloads import GENERATIONS, SHORT_TOKENS, TASKS, TEXT_TOKENS, Ids, corpus, texts
from anycore.config import ModelConfig
from anycore.errors import ConfigError

if TYPE_CHECKING:
    from anycore.llm import LLM

Numbers = dict[str, float]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id, modelscope:ID or pkg:NAME")
    parser.add_argument("--workload", default="G1", metavar="NAMES", help=f"comma-separated: {', '.join(TASKS)}")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="measured runs of each workload (default: 3)")
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    names = [name.strip().upper() for name in options.workload.split(",")]
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"--workload {name} is not one of {', '.join(TASKS)}", param="workload")
    if options.runs < 1:
        raise ConfigError(f"--runs must be at least 1, not {options.runs}", param="runs")
    for task in dict.fromkeys(TASKS[name] for name in names):
        start = time.perf_counter()
        llm = open_quietly(options, task)
        loading = time.perf_counter() - start
        ids = llm.tokenizer.encode(corpus(), add_special_tokens=False)
        about = {"engine": "anycore", "model": options.model, "dtype": vars(options).get("dtype", "auto")}
        for name in (name for name in names if TASKS[name] == task):
            for label, numbers in MEASURES[name](llm, name, ids, options.runs).items():
                emit(about | {"workload": label} | numbers | {"load_s": loading, "peak_rss_mib": peak_rss_mib()})
    return 0


def open_quietly(options: argparse.Namespace, task: str) -> LLM:
    """Open the model without a progress display, whose drawing would be measured too."""
    from anycore.llm import LLM

    return LLM(**(given(options, ModelConfig) | {"model": options.model, "task": task}))


def emit(row: dict[str, object]) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def generation(llm: LLM, name: str, ids: Ids, runs: int) -> dict[str, Numbers]:
    """Output tokens a second; for a single stream also the time to the first token and the speed after it."""
    work = GENERATIONS[name]
    _generate(llm, GENERATIONS["G1"].prompts(ids, 99), 8)
    rows = []
    for number in range(runs):
        prompts = work.prompts(ids, number)
        wall = _generate(llm, prompts, work.new_tokens)
        row = {"out_tok_s": len(prompts) * work.new_tokens / wall, "wall_s": wall}
        if len(prompts) == 1:
            llm.engine.reset_prefix_cache()
            row["ttft_s"] = _generate(llm, prompts, 1)
            row["decode_tok_s"] = (work.new_tokens - 1) / (wall - row["ttft_s"])
        rows.append(row)
    return {name: medians(rows)}


def _generate(llm: LLM, prompts: list[Ids], new_tokens: int) -> float:
    """Seconds to generate exactly `new_tokens` after each prompt."""
    from anycore.engine.request import SamplingParams

    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    return timed(lambda: llm.generate(prompts, params))


def embedding(llm: LLM, name: str, ids: Ids, runs: int) -> dict[str, Numbers]:
    """Texts a second of a pile of 512."""
    pile = texts(ids, llm.tokenizer.decode, 512)
    llm.embed(pile[:64])
    seconds = [timed(lambda: llm.embed(pile)) for _ in range(runs)]
    length = TEXT_TOKENS + 2
    return {name: medians([{"texts_s": len(pile) / s, "tok_s": length * len(pile) / s} for s in seconds])}


def latency(llm: LLM, name: str, ids: Ids, runs: int) -> dict[str, Numbers]:
    """Milliseconds of single texts, long and short."""
    found = {}
    for tokens in (TEXT_TOKENS, SHORT_TOKENS):
        singles = texts(ids, llm.tokenizer.decode, 200, tokens, seed=11)
        llm.embed(singles[:1])
        times = sorted(1e3 * timed(lambda text=text: llm.embed(text)) for text in singles)  # type: ignore[misc]
        last = len(times) - 1
        found[f"{name} {tokens + 2}tok"] = {"p50_ms": times[round(0.5 * last)], "p99_ms": times[round(0.99 * last)]}
    return found


def reranking(llm: LLM, name: str, ids: Ids, runs: int) -> dict[str, Numbers]:
    """Documents a second, 100 of them for one query."""
    query = texts(ids, llm.tokenizer.decode, 1, SHORT_TOKENS, seed=5)[0]
    pile = texts(ids, llm.tokenizer.decode, 500)
    llm.score(query, pile[400:])
    sets = [pile[100 * (number % 4) : 100 * (number % 4) + 100] for number in range(runs)]
    seconds = [timed(lambda documents=documents: llm.score(query, documents)) for documents in sets]  # type: ignore[misc]
    return {name: medians([{"docs_s": 100 / s, "wall_s": s} for s in seconds])}


MEASURES: dict[str, Callable[[LLM, str, Ids, int], dict[str, Numbers]]] = {
    **dict.fromkeys(GENERATIONS, generation),
    "E1": embedding,
    "E2": latency,
    "R1": reranking,
}


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(rows: list[Numbers]) -> Numbers:
    """Median of each number over the runs, and the spread of the first one."""
    out = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    first = next(iter(rows[0]))
    out["min_" + first] = min(row[first] for row in rows)
    out["max_" + first] = max(row[first] for row in rows)
    return out


def peak_rss_mib() -> float:
    """Most memory this process ever had resident. macOS counts bytes, Linux KiB."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value / 2**20 if sys.platform == "darwin" else value / 2**10
