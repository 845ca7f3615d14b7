"""Progress: plain lines without a terminal, bars on one, both ending when the work does."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from anycore.cli.progress import Bars, Lines, show_progress, split

PHASES = [
    ("m: open", 0.0),
    ("m: load", 0.0),
    ("m: load", 0.5),
    ("m: load", 1.0),
    ("m: warm up", 0.0),
    ("m: ready", 1.0),
]


def test_lines_tell_beginnings_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(100))
    lines = Lines(lambda: float(next(clock)))
    with caplog.at_level("INFO"):
        for phase, fraction in PHASES:
            lines(phase, fraction)
    assert caplog.messages == ["m: open", "m: load", "m: load: done in 2.0 s", "m: warm up", "m: ready"]


def test_lines_are_few(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = Lines(lambda: now)
    with caplog.at_level("INFO"):
        for step in range(100):
            now = step / 10
            lines("load", step / 100)
    assert caplog.messages == ["load", "load: 50 %"]


def test_bars_go_when_the_work_is_done() -> None:
    screen = io.StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=80))
    for phase, fraction in PHASES[:-1]:
        bars(phase, fraction)
        assert not bars._progress.finished or fraction >= 1
    assert bars._progress.live.is_started
    bars(*PHASES[-1])
    assert not bars._progress.live.is_started
    assert "m: warm up" in screen.getvalue()


def test_bars_of_two_models_end_with_the_last() -> None:
    bars = Bars(Console(file=io.StringIO(), force_terminal=True))
    bars("a: load", 0.5)
    bars("b: load", 0.5)
    bars("a: ready", 1.0)
    assert bars._progress.live.is_started
    bars("b: ready", 1.0)
    assert not bars._progress.live.is_started


def test_log_lines_go_above_the_bars_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    plain = sys.stderr
    bars = Bars(Console(file=io.StringIO(), force_terminal=True))
    bars("load", 0.0)
    assert handler.stream is not plain
    bars("ready", 1.0)
    assert handler.stream is plain


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with show_progress() as report:
        assert isinstance(report, Lines)


def test_a_phase_splits_into_subject_and_activity() -> None:
    assert split("pkg:a==1: load") == ("pkg:a==1", "load")
    assert split("load") == ("", "load")
