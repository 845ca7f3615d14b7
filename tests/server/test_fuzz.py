"""O02: a few hundred spoilt bodies, as `ci/fuzz.py` sends them by the hundred thousand."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from server.conftest import served
from server.harness import Live, serve_here

SHOTS = 150
CI = Path(__file__).parents[2] / "ci"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", CI / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def live(t_lm: Path, t_bert: Path, t_ce: Path) -> Iterator[Live]:
    models = served(t_lm, "lm", max_model_len=128), served(t_bert, "embed"), served(t_ce, "rerank")
    with serve_here(*models) as live:
        yield live


def test_spoilt_bodies_are_refused_and_leave_nothing(fuzz: ModuleType, live: Live) -> None:
    before = fuzz.known(live.url)
    assert [status for status, _ in before] == [200] * len(before)
    report = fuzz.Report()
    fuzz.spoilt(live.url, range(SHOTS), fuzz.field_names(live.url), report)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.requests == SHOTS
    assert {"200", "400", "415", "hung up"} <= set(report.statuses), report.statuses
    assert fuzz.known(live.url) == before
    live.wait(lambda: fuzz.in_use(live) == 0, 10)


def test_every_post_route_is_fuzzed(fuzz: ModuleType, live: Live) -> None:
    """And every body that is to be spoilt is right."""
    paths = live.get("/openapi.json").json()["paths"]
    assert {path for path in paths if "post" in paths[path] and "{" not in path} == set(fuzz.VALID)
    for path, bodies in fuzz.VALID.items():
        for body in bodies:
            assert live.post(path, body).status_code == 200, (path, body)


def test_a_number_makes_the_same_request_again(fuzz: ModuleType) -> None:
    fields = ["model", "top_k"]
    assert [fuzz.shot_of(i, fields) for i in range(300)] == [fuzz.shot_of(i, fields) for i in range(300)]
    assert len({fuzz.shot_of(i, fields).wire for i in range(300)}) > 200


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 500 x\r\n\r\n{}", "status 500"),
        (b"HTTP/1.1 400 x\r\n\r\n{}", "an error without the envelope"),
        (b"HTTP/1.1 200 x\r\n\r\n{", "an answer that is not JSON"),
        (b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n", "a stream without an end"),
        (b"", "no answer"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 x\r\n\r\n{}", None),
    ],
)
def test_what_is_wrong_is_seen(fuzz: ModuleType, answer: bytes, problem: str | None) -> None:
    assert fuzz.judged(answer, is_torn=False)[1] == problem


def test_bodies_hold_what_json_does_not(fuzz: ModuleType) -> None:
    bodies = sys.modules["fuzz_bodies"]
    found: Any = json.loads(bodies.written({"a": 1, bodies.Twice("a"): bodies.Raw("NaN")}))
    assert found["a"] != found["a"]  # NaN, and the last one holds
    assert bodies.odd(Random(1)) is not None
