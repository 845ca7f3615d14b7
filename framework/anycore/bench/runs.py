"""Runs of a load: over the points of a sweep, on one server or two in turns, each with what it takes to repeat it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from anycore.bench.latencies import Slo
from anycore.bench.load import Load
from anycore.bench.report import summarize
from anycore.bench.workers import run_load

COMPARED = (
    "request_throughput",
    "total_token_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
)
WIDTHS = (12, 12, 10, 10, 9, 9)


def turns(points: Sequence[Sequence[Load]], rounds: int) -> Iterator[Load]:
    """All runs in order. Both servers get the same requests; other points and rounds get others, as caches remember."""
    for place, sides in enumerate(points):
        for number in range(rounds):
            for load in sides if (place + number) % 2 == 0 else reversed(sides):
                yield replace(load, seed=load.seed + place * rounds + number)


def measure(load: Load, processes: int, slo: Slo, detailed: bool) -> dict[str, Any]:
    """Put one load on its server; return the figures, and what they are figures of."""
    outcomes, busy = run_load(load, processes)
    asked = asdict(load)
    for name in ("api_key", "url"):
        del asked[name]
    asked["request_rate"] = None if math.isinf(load.request_rate) else load.request_rate
    asked["file"] = None if load.file is None else str(load.file)
    figures = summarize(outcomes, slo)
    row = {"target": load.url, **asked, "goodput": slo, **figures, "generator_busy": busy}
    row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    if detailed:
        row["requests"] = [
            {"sent": o.sent, "ttft": o.first, "e2el": o.total, "itl": o.gaps, "input_tokens": o.input_tokens,
             "output_tokens": o.output_tokens, "status": o.status, "error": o.error} for o in outcomes
        ]  # fmt: skip
    return row


def heading(row: dict[str, Any]) -> str:
    rate, open_at_once = row["request_rate"] or "inf", row["max_concurrency"] or "no limit"
    return f"\n{row['target']}: {rate} requests/s, {open_at_once} at once, seed {row['seed']}"


def compared(rows: Sequence[dict[str, Any]], urls: Sequence[str]) -> Iterator[str]:
    """A line for each point and server: medians of the rounds, and of a peer how much of ours it reaches."""
    head = f"\n{'rate':>8}{'at once':>9}{'requests/s':>12}{'tokens/s':>12}"
    yield head + f"{'TTFT p50':>10}{'p99':>10}{'ITL p50':>9}{'p99':>9}"
    for rate, places in dict.fromkeys((row["request_rate"], row["max_concurrency"]) for row in rows):
        first: list[float] = []
        for url in urls:
            here = [r for r in rows if (r["request_rate"], r["max_concurrency"], r["target"]) == (rate, places, url)]
            values = [statistics.median(r.get(name, math.nan) for r in here) for name in COMPARED]
            shown = [f"{value:{width}.2f}" for value, width in zip(values, WIDTHS, strict=True)]
            yield f"{rate or 'inf':>8}{places or 'inf':>9}{''.join(shown)}  {url}"
            if first:
                ratios = [value / own if own else math.nan for value, own in zip(values, first, strict=True)]
                shown = [f"{ratio:{width}.2f}" for ratio, width in zip(ratios, WIDTHS, strict=True)]
                yield f"{'':17}{''.join(shown)}  times the first"
            first = first or values
