"""Draws the figures of runs as one page of HTML, or one SVG, that needs no script, no font and no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from anycore.bench.latencies import LABELS

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 300, 70, 46, 34
COLOURS = ("#1769aa", "#c2410c", "#2e7d32", "#7b1fa2", "#5d4037", "#00838f")
SHOWN = (
    ("output_throughput", "Output tokens a second"),
    ("request_throughput", "Requests a second"),
    ("request_goodput", "Requests a second within the limits"),
    ("median_ttft_ms", "Time to first token, median (ms)"),
    ("p99_ttft_ms", "Time to first token, p99 (ms)"),
    ("median_itl_ms", "Between tokens, median (ms)"),
    ("p99_itl_ms", "Between tokens, p99 (ms)"),
    ("p99_e2el_ms", "End to end, p99 (ms)"),
)
SHARES = ("median", "p90", "p95", "p99")

Point = tuple[float, float]
Series = dict[str, list[Point]]


@dataclass(frozen=True, slots=True)
class Chart:
    """What one chart shows."""

    title: str
    label: str  # of the x axis
    series: Series  # a line for each server
    ticks: dict[int, str] = field(default_factory=dict)  # names of places on the x axis; none: the numbers


def charts(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """A chart for each figure over the points of a sweep; of a single point its percentiles."""
    axis = "request_rate" if len({row["request_rate"] for row in rows}) > 1 else "max_concurrency"
    label = {"request_rate": "Requests a second that arrive", "max_concurrency": "Requests open at once"}[axis]
    made = []
    if len({row[axis] for row in rows}) > 1:
        for figure, title in SHOWN:
            series: Series = {}
            for row in rows:
                if figure in row and row[axis] is not None:
                    series.setdefault(row["target"], []).append((row[axis], row[figure]))
            if series:
                made.append(Chart(title, label, {name: averaged(points) for name, points in series.items()}))
        return made
    for figure in LABELS:
        series = {}
        for row in rows:
            if f"median_{figure}_ms" in row:
                points = [(place, row[f"{share}_{figure}_ms"]) for place, share in enumerate(SHARES)]
                series.setdefault(row["target"], []).extend((float(x), y) for x, y in points)
        if series:
            ticks = dict(enumerate(("p50", "p90", "p95", "p99")))
            drawn = {name: averaged(points) for name, points in series.items()}
            made.append(Chart(f"{figure.upper()} (ms)", "share of the requests below", drawn, ticks))
    return made


def title_of(rows: Sequence[dict[str, Any]]) -> str:
    """What was asked, and how."""
    return f"{rows[0]['model']}, {rows[0]['endpoint']}"


def averaged(points: list[Point]) -> list[Point]:
    """One point for each place, the mean of the rounds there."""
    places: dict[float, list[float]] = {}
    for x, y in points:
        places.setdefault(x, []).append(y)
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(places.items())]


def drawing(chart: Chart) -> str:
    """An SVG with a line for each series, from 0 upwards."""
    series = chart.series
    xs = sorted({x for points in series.values() for x, _ in points})
    top = max((y for points in series.values() for _, y in points), default=0.0) or 1.0
    low, high = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1

    def across(x: float) -> float:
        return LEFT + (x - low) / (high - low) * (WIDTH - LEFT - 24)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - BOTTOM - TOP - 14 * len(series))

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(chart.title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = up(share * top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 24}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.4g}</text>')
    for x in xs:
        text = chart.ticks.get(int(x), f"{x:g}")
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.label)}</text>')
    for place, (name, points) in enumerate(series.items()):
        colour = COLOURS[place % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{LEFT}" y="{TOP + 14 * place}" fill="{colour}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'
    )


def page(rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """The charts above the same figures as text."""
    title = title_of(rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<body style="font-family:sans-serif"><h1>{escape(title)}</h1><div>{"".join(map(drawing, charts(rows)))}</div>'
        f"<pre>{escape(chr(10).join(lines))}</pre></body></html>\n"
    )


def svg(rows: Sequence[dict[str, Any]]) -> str:
    """All charts below each other."""
    drawn = [drawing(chart) for chart in charts(rows)]
    inner = [text.replace("<svg ", f'<svg y="{HEIGHT * place}" ', 1) for place, text in enumerate(drawn)]
    size = f'width="{WIDTH}" height="{HEIGHT * len(drawn)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(inner)}</svg>\n'
