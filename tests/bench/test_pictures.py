"""Plots of `bench serve`: what they show of each server, in every form a file may have."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from anycore.bench.plot import COLOURS, HEIGHT, charts, page, svg
from anycore.cli.main import main

OURS, PEER = "http://ours/v1", "http://peer/v1"
LATENCIES = ("ttft", "tpot", "itl", "e2el")
FORMS = ("mean", "median", "p90", "p95", "p99")


def row(target: str, concurrency: int | None, factor: float = 1.0) -> dict[str, Any]:
    """The figures of one run; those of a peer differ by a factor."""
    found = {f"{form}_{name}_ms": factor * (10 + place) for place, form in enumerate(FORMS) for name in LATENCIES}
    found |= {"request_throughput": 4 / factor, "output_throughput": 50 / factor}
    return {"target": target, "model": "lm", "endpoint": "chat", "request_rate": None, "max_concurrency": concurrency,
            **found}  # fmt: skip


SWEEP = [row(target, places, factor) for places in (1, 4, 16) for target, factor in ((OURS, 1.0), (PEER, 1.7))]
POINT = [row(OURS, 4), row(PEER, 4, 1.7)]


def png(rows: Sequence[dict[str, Any]]) -> bytes:
    pytest.importorskip("matplotlib")
    from anycore.bench import picture

    return picture.png(rows)


@pytest.mark.parametrize(("rows", "number"), [(SWEEP, 7), (POINT, 4)], ids=["sweep", "point"])
def test_every_chart_has_a_line_for_each_server(rows: list[dict[str, Any]], number: int) -> None:
    drawn = charts(rows)
    assert len(drawn) == number
    assert all(list(chart.series) == [OURS, PEER] for chart in drawn)
    text = page(rows, ["as <text>"])
    assert text.count("<svg") == number
    assert "as &lt;text&gt;" in text
    whole = ElementTree.fromstring(svg(rows))
    assert whole.attrib["height"] == str(HEIGHT * number)
    for form in (text, svg(rows)):
        assert form.count("<polyline") == 2 * number
        assert form.count(PEER) == number


@pytest.mark.parametrize(("rows", "down"), [(SWEEP, 4), (POINT, 2), ([row(OURS, None)], 2)])
def test_a_png_opens_and_shows_every_server_in_its_colour(rows: list[dict[str, Any]], down: int) -> None:
    data = png(rows)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1344, 384 * down + 48)

    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(data)) as image:
        assert image.size == (width, height)
        found = {colour for _, colour in image.convert("RGB").getcolors(width * height) or ()}
    used = [tuple(bytes.fromhex(colour[1:])) in found for colour in COLOURS[:2]]
    assert used == [True, len(rows) > 1]


def test_a_run_without_one_answer_is_a_picture_too() -> None:
    failed = {"target": OURS, "model": "lm", "endpoint": "chat", "request_rate": None, "max_concurrency": None}
    assert png([failed]).startswith(b"\x89PNG")


def test_a_png_without_matplotlib_is_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import anycore.bench

    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.delitem(sys.modules, "anycore.bench.picture", raising=False)
    monkeypatch.delattr(anycore.bench, "picture", raising=False)
    words = ["bench", "serve", "--url", "http://127.0.0.1:9/v1", "--model", "lm", "--plot", str(tmp_path / "a.png")]
    assert main(words) == 2
    assert "pip install 'anycore[plots]'" in capsys.readouterr().err
    assert main([*words[:-1], "a.jpg"]) == 2
    assert ".html or .png or .svg" in capsys.readouterr().err
