"""A real engine on the CPU that is killed, and reloaded from a damaged checkpoint, with requests running; clients that
leave or fall silent, as `ci/faults` does it many times."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
from server.conftest import served
from server.harness import Live, serve_here, serve_process

from anycore.server import http

sys.path.append(str(Path(__file__).parents[2] / "ci"))

from faults import clients
from faults.kinds import FAULTS, Place
from faults.measure import exercise

KILLS = 3


@pytest.fixture(scope="module")
def live(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    runtime = tmp_path_factory.mktemp("runtime")
    options = ("--backend", "cpu", "--dtype", "float32", "--kv-cache-memory", "4MiB", "--threads", "1")
    with serve_process(
        str(t_lm), "--served-model-name", "lm", *options, env={"XDG_RUNTIME_DIR": str(runtime)}
    ) as server:
        server.runtime = runtime  # type: ignore[attr-defined]
        yield server


def ask(live: Live, tokens: int) -> tuple[int, str]:
    """The status of an answer, and its text or the code of its error."""
    body = {"model": "lm", "prompt": "the river", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = live.post("/v1/completions", body)
    found = answer.json()
    return answer.status_code, found["choices"][0]["text"] if answer.status_code == 200 else found["error"]["code"]


def reserved(live: Live) -> list[int]:
    """Processes that have memory reserved for their start."""
    files = list((live.runtime / "anycore").glob("*.leases"))  # type: ignore[attr-defined]
    assert files
    return [entry["pid"] for file in files for entry in json.loads(file.read_text() or "[]")]


def test_o01_a_killed_engine_comes_back_each_time_and_leaves_nothing(live: Live) -> None:
    expected = ask(live, 8)
    assert expected[0] == 200
    for kill in range(KILLS):
        (engine,) = live.engines()
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, live, 100_000 if kill == 0 else 60) for _ in range(4)]
            os.kill(engine, signal.SIGKILL)
            ends = {answer.result() for answer in answers}
        assert all(status == 200 or code in ("engine_dead", "model_restarting", "context_length_exceeded")
                   for status, code in ends), ends  # fmt: skip
        live.wait(lambda gone=engine: gone not in live.engines() and len(live.engines()) == 1, 30)  # type: ignore[misc]
        live.wait(lambda: ask(live, 8) == expected, 30)
        assert engine not in reserved(live)
    assert reserved(live) == []
    assert "Traceback" not in "".join(live.output)


def test_a_damaged_checkpoint_is_refused_and_a_whole_one_taken(live: Live, t_lm: Path, tmp_path: Path) -> None:
    expected = ask(live, 8)
    damaged, whole = tmp_path / "damaged", tmp_path / "whole"
    for folder in (damaged, whole):
        shutil.copytree(t_lm, folder)
    weights = next(damaged.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    with ThreadPoolExecutor(4) as pool:
        for folder, status in ((damaged, 400), (whole, 200)):
            answers = [pool.submit(ask, live, 8) for _ in range(12)]
            changed = live.post("/v1/models/lm/reload", {"checkpoint": str(folder)})
            assert changed.status_code == status, changed.text
            assert status == 200 or weights.name in changed.json()["error"]["message"]
            assert {answer.result() for answer in answers} == {expected}
    live.wait(lambda: len(live.engines()) == 1, 10)
    assert reserved(live) == []


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server that has little patience with clients."""
    folder = tiny.tiny_lm(tmp_path_factory.mktemp("long"), layers=1, max_positions=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "LOOK_TICKS", 1)
        patch.setattr(clients, "LIMIT", 0.5)
        with serve_here(served(folder, "lm"), read_timeout=0.5, write_timeout=0.5) as live:
            yield Place(live, folder, folder)


@pytest.mark.parametrize("name", ["leave", "half-open"])
def test_m10_m12_clients_that_misbehave_cost_the_others_nothing(strict: Place, name: str) -> None:
    row = exercise(strict, FAULTS[name], times=3)
    assert row.times == 3
    assert row.ends.answered == row.ends.sent > 0
    assert row.bad == 0, row.line()
