"""The figures of a simulated run, under the names that `anycore bench serve` gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anycore.bench.latencies import LABELS, Slo
from anycore.simulate.fleet import Outcomes

Vector = NDArray[np.float64]
SHARES = (90, 95, 99)


def summarize(
    found: Outcomes, slo: Slo, block_tokens: int, price: float | None = None, ranks: int = 1
) -> dict[str, Any]:
    """Figures of all requests; latencies are of those that were answered, in milliseconds.

    Args:
        slo: limits in milliseconds; a request within all of them counts as good, one that was refused never does.
        block_tokens: tokens that one engine's KV cache holds.
        price: of one device and hour; an engine takes `ranks` devices.
    """
    sent, end = np.frombuffer(found.sent), np.frombuffer(found.end)
    completed, failed = len(end), found.refused + found.too_long
    figures: dict[str, Any] = {"completed": completed, "failed": failed, "replicas": found.replicas,
                               "devices": found.replicas * ranks}  # fmt: skip
    if failed:
        figures |= {"refused": found.refused, "too_long": found.too_long}
    if not completed:
        return figures
    duration = float(end.max() - sent.min())
    read, written = int(sum(found.prompt)), int(sum(found.output))
    figures |= {
        "duration": duration,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": completed / duration,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
        "max_concurrent_requests": most_at_once(sent, end),
    }
    if slo:
        good = int(within(found, slo).sum())
        figures |= {"request_goodput": good / duration, "attained": good / (completed + failed)}
    for name, values in latencies(found).items():
        if len(values):
            figures |= spread(name, values)
    if any(len(seen.ends) for seen in found.engines):
        figures |= itl(found)
    figures |= engines(found, duration, block_tokens)
    if price is not None:
        cost = price * figures["devices"] * duration / 3600
        figures |= {
            "price_per_hour": price * figures["devices"],
            "cost_per_million_output_tokens": 1e6 * cost / written,
            "cost_per_million_tokens": 1e6 * cost / (read + written),
        }
    return figures


def latencies(found: Outcomes) -> dict[str, Vector]:
    """Seconds of every request, by the names of LABELS; `itl` has more than one a request and is told by `itl`."""
    sent, first, end = (np.frombuffer(column) for column in (found.sent, found.first, found.end))
    output = np.frombuffer(found.output, dtype=np.uint32).astype(float)
    several = output > 1
    return {
        "ttft": first - sent,
        "tpot": (end - first)[several] / (output[several] - 1),
        "e2el": end - sent,
    }


def within(found: Outcomes, slo: Slo) -> NDArray[np.bool_]:
    """Which requests kept every limit; that on `itl` is kept by a request's longest gap."""
    sent, first, end = (np.frombuffer(column) for column in (found.sent, found.first, found.end))
    output = np.frombuffer(found.output, dtype=np.uint32).astype(float)
    seen = {
        "ttft": first - sent,
        "tpot": (end - first) / np.maximum(output - 1, 1),
        "itl": np.frombuffer(found.longest),
        "e2el": end - sent,
    }
    good = np.ones(len(end), dtype=bool)
    for name, limit in slo.items():
        good &= 1e3 * seen[name] <= limit
    return good


def spread(name: str, seconds: Vector) -> dict[str, float]:
    values = 1e3 * seconds
    figures = {f"mean_{name}_ms": float(values.mean()), f"median_{name}_ms": float(np.median(values))}
    shares = np.percentile(values, SHARES)
    return figures | {f"p{share}_{name}_ms": float(value) for share, value in zip(SHARES, shares, strict=True)}


def itl(found: Outcomes) -> dict[str, float]:
    """Figures of all gaps between tokens: those of a turn are alike, so each is a gap and how often it was seen. Where
    fronts take time it is gaps between the pieces that they sent, as clients see them."""
    gaps, counts = [], []
    for front in found.fronts:
        gaps.append(np.array(list(front.gaps), dtype=float) / 1e6)
        counts.append(np.array(list(front.gaps.values()), dtype=np.int64))
    for seen in found.engines if not found.fronts else ():
        if seen.ends:
            gaps.append(np.diff(np.frombuffer(seen.ends)))
            counts.append(np.frombuffer(seen.steady, dtype=np.uint32)[1:].astype(np.int64))
        gaps.append(np.array(seen.gaps))
        counts.append(np.ones(len(seen.gaps), dtype=np.int64))
    values, weights = 1e3 * np.concatenate(gaps), np.concatenate(counts)
    if not weights.sum():
        return {}
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    figures = {"mean_itl_ms": float((values * weights).sum() / weights.sum())}
    for label, share in (("median", 50), *((f"p{share}", share) for share in SHARES)):
        figures[f"{label}_itl_ms"] = weighted(values, weights, share)
    return figures


def weighted(ordered: Vector, counts: NDArray[np.int64], share: float) -> float:
    """The percentile of ordered values, each there so many times, interpolated as numpy does it."""
    upto = np.cumsum(counts)
    place = share / 100 * (upto[-1] - 1)
    below = int(place)
    low, high = (ordered[np.searchsorted(upto, at, side="right")] for at in (below, min(below + 1, upto[-1] - 1)))
    return float(low + (place - below) * (high - low))


def most_at_once(sent: Vector, end: Vector) -> int:
    """The largest number of requests that were open at the same time."""
    moments = np.concatenate([end, sent])  # at the same moment, who ends goes first
    steps = np.concatenate([-np.ones(len(end), dtype=np.int64), np.ones(len(sent), dtype=np.int64)])
    return int(np.cumsum(steps[np.argsort(moments, kind="stable")]).max())


def engines(found: Outcomes, duration: float, block_tokens: int) -> dict[str, Any]:
    """What the engines did, all of them together."""
    seen = found.engines
    busy = sum(one.busy for one in seen) or 1.0
    prompts = sum(one.prompt_tokens for one in seen)
    return {
        "steps": sum(len(one.ends) for one in seen),
        "mean_step_rows": sum(one.rows for one in seen) / max(1, sum(len(one.ends) for one in seen)),
        "busy": busy / duration / len(seen),
        "mean_running": sum(one.running for one in seen) / busy,
        "max_waiting": max(one.waiting_most for one in seen),
        "kv_tokens": block_tokens,
        "mean_kv_use": sum(one.kv for one in seen) / busy,
        "max_kv_use": max(one.kv_most for one in seen),
        "preemptions": found.preemptions,
        "prefix_hit_share": sum(one.cached_tokens for one in seen) / prompts if prompts else 0.0,
    }


# --- text ---------------------------------------------------------------------------------------------------------


def lines(row: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    devices = f"{row['devices']} device{'s' if row['devices'] > 1 else ''}"
    yield f"{row['request_rate'] or 'inf'} requests/s, {row['max_concurrency'] or 'no limit'} at once, {devices}"
    if not row["completed"]:
        yield f"  none of {row['failed']} requests is answered: {row['too_long']} are longer than the model takes"
        return
    yield f"  {row['completed']} answered in {row['duration']:.1f} s, {row['failed']} refused"
    if "request_goodput" in row:
        yield f"  within limits    {row['request_goodput']:>12,.2f} requests/s, {row['attained']:.2%} of all"
    yield f"  requests/s       {row['request_throughput']:>12,.2f}"
    yield f"  output tokens/s  {row['output_throughput']:>12,.1f}"
    yield f"  all tokens/s     {row['total_token_throughput']:>12,.1f}"
    yield f"  running          {row['mean_running']:>12,.1f} in the mean, {row['max_waiting']} waited at most"
    yield f"  KV cache         {row['mean_kv_use']:>12.1%} in the mean, {row['max_kv_use']:.1%} at most"
    yield f"  preemptions      {row['preemptions']:>12,}"
    yield f"  prefix hits      {row['prefix_hit_share']:>12.1%} of prompt tokens"
    yield f"  busy             {row['busy']:>12.1%}"
    yield from front_lines(row)
    if "price_per_hour" in row:
        yield f"  cost of a million{row['cost_per_million_output_tokens']:>12,.3f} for output tokens, " \
              f"{row['cost_per_million_tokens']:,.3f} for all"  # fmt: skip
    yield f"  {'milliseconds':24}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}"
    for name, label in LABELS.items():
        if f"mean_{name}_ms" in row:
            values = [row[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p95", "p99")]
            yield f"  {label:24}" + "".join(f"{value:10.2f}" for value in values)


def front_lines(row: dict[str, Any]) -> Iterator[str]:
    if "fronts" not in row:
        return
    many = f"{row['fronts']} processes, the busiest of them" if row["fronts"] > 1 else "1 process"
    yield f"  front busy       {row['front_busy']:>12.1%} of {many}, {row['tokens_per_chunk']:.1f} tokens a piece"
    if row["front_limits"]:
        rate = row["output_throughput_of_engines"]
        if row["fronts_needed"] > row["fronts"]:
            yield f"  the front is the limit: the {rate:,.0f} tokens/s that the engines would compute take " \
                  f"{row['fronts_needed']} processes (--api-servers)"  # fmt: skip
        else:
            yield f"  the front is the limit, by how connections are divided: {row['fronts_needed']} equal shares of " \
                  f"{rate:,.0f} tokens/s would be enough"  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each point."""
    head = f"{'rate':>8}{'at once':>9}{'devices':>9}{'requests/s':>12}{'tokens/s':>11}{'KV use':>8}{'TTFT p50':>10}"
    yield head + f"{'p99':>10}{'ITL p50':>9}{'p99':>9}" + (f"{'within':>9}" if "attained" in rows[0] else "")
    for row in (row for row in rows if row["completed"]):
        values = f"{row['request_rate'] or 'inf':>8}{row['max_concurrency'] or 'inf':>9}{row['devices']:>9}"
        values += f"{row['request_throughput']:>12.2f}{row['output_throughput']:>11.1f}{row['mean_kv_use']:>8.1%}"
        for name, width in (("median_ttft", 10), ("p99_ttft", 10), ("median_itl", 9), ("p99_itl", 9)):
            values += f"{row.get(f'{name}_ms', float('nan')):>{width}.2f}"
        yield values + (f"{row['attained']:>9.2%}" if "attained" in row else "")
