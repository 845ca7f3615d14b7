"""Draws the figures of runs as one PNG, by matplotlib, which needs no screen for it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anycore.bench.plot import COLOURS, charts, title_of

COLUMNS = 2
PANEL = 5.6, 3.2  # inches of each chart
TITLE = 0.4  # inches above them all
DOTS = 120  # an inch


def png(rows: Sequence[dict[str, Any]]) -> bytes:
    """The charts that `plot.charts` makes, side by side."""
    drawn = charts(rows)
    down = max(math.ceil(len(drawn) / COLUMNS), 1)
    figure = Figure(figsize=(PANEL[0] * COLUMNS, PANEL[1] * down + TITLE), dpi=DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(rows))
    for axes, chart in zip(figure.subplots(down, COLUMNS, squeeze=False).flat, drawn, strict=False):
        for place, (name, points) in enumerate(chart.series.items()):
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker="o", color=COLOURS[place % len(COLOURS)], label=name)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.label)
        most = max(y for points in chart.series.values() for _, y in points) or 1.0
        axes.set_ylim(0, 1.3 * most)  # the names of the servers stand above the lines
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize="small")
        ticks: dict[float, str] = {x: f"{x:g}" for points in chart.series.values() for x, _ in points}
        ticks |= {float(x): name for x, name in chart.ticks.items()}
        axes.set_xticks(list(ticks), list(ticks.values()))
    for axes in list(figure.axes)[len(drawn) :]:
        axes.remove()
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()
