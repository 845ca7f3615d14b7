"""Figures of a benchmark under the names that vLLM's `bench serve` gives them, so that both can be compared."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from anycore.bench.client import Outcome
from anycore.bench.latencies import LABELS, Slo


def summarize(outcomes: list[Outcome], slo: Slo) -> dict[str, Any]:
    """Figures of all requests; latencies are of those that succeeded, in milliseconds."""
    good = [outcome for outcome in outcomes if not outcome.error]
    failed = [outcome for outcome in outcomes if outcome.error]
    duration = max(o.sent + o.total for o in outcomes) - min(o.sent for o in outcomes)
    read, written = sum(o.input_tokens for o in good), sum(o.output_tokens for o in good)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(failed),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / duration,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
        "max_concurrent_requests": most_at_once(outcomes),
    }
    if slo:
        figures["request_goodput"] = sum(within(o, slo) for o in good) / duration
    for name, values in latencies(good).items():
        figures |= spread(name, values)
    if failed:
        figures["errors"] = dict(Counter(str(o.status or "no answer") for o in failed))
        figures["first_error"] = min(failed, key=lambda o: o.sent).error
    return figures


def latencies(good: list[Outcome]) -> dict[str, list[float]]:
    found = {
        "ttft": [o.first for o in good if o.first],
        "tpot": [per_token(o) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.gaps],
        "e2el": [o.total for o in good],
    }
    return {name: [1e3 * value for value in values] for name, values in found.items() if values}


def per_token(outcome: Outcome) -> float:
    """Seconds a token, the first one left out."""
    return (outcome.total - outcome.first) / max(outcome.output_tokens - 1, 1)


def within(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request kept every limit; that on `itl` is kept by its longest gap."""
    seen = {"ttft": outcome.first, "tpot": per_token(outcome), "itl": max(outcome.gaps, default=0.0)}
    seen["e2el"] = outcome.total
    return all(1e3 * seen[name] <= limit for name, limit in slo.items())


def spread(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    figures = {"mean": statistics.fmean(ordered), "median": percentile(ordered, 50)}
    figures |= {f"p{share}": percentile(ordered, share) for share in (90, 95, 99)}
    return {f"{figure}_{name}_ms": value for figure, value in figures.items()}


def percentile(ordered: list[float], share: float) -> float:
    """Interpolated between the two nearest of the ordered values, as numpy does it."""
    place = share / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def most_at_once(outcomes: list[Outcome]) -> int:
    """The largest number of requests that were open at the same time."""
    edges = sorted([(o.sent, 1) for o in outcomes] + [(o.sent + o.total, -1) for o in outcomes])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    count = figures["completed"] + figures["failed"]
    most = figures["max_concurrent_requests"]
    yield f"{figures['completed']} of {count} requests in {figures['duration']:.2f} s, at most {most} at once"
    yield f"  input tokens   {figures['total_input_tokens']:>12,}"
    yield f"  output tokens  {figures['total_output_tokens']:>12,}"
    yield f"  requests/s     {figures['request_throughput']:>12,.2f}"
    if "request_goodput" in figures:
        yield f"  within limits/s{figures['request_goodput']:>12,.2f}"
    yield f"  output tokens/s{figures['output_throughput']:>12,.1f}"
    yield f"  all tokens/s   {figures['total_token_throughput']:>12,.1f}"
    if figures["completed"]:
        yield f"{'milliseconds':26}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}"
    for name, label in LABELS.items():
        if f"mean_{name}_ms" in figures:
            row = [figures[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p95", "p99")]
            yield f"  {label:24}" + "".join(f"{value:10.2f}" for value in row)
    if figures["failed"]:
        kinds = ", ".join(f"{number} x {status}" for status, number in figures["errors"].items())
        yield f"{figures['failed']} failed ({kinds}); the first one: {figures['first_error']}"
