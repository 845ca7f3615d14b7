"""Overload and clients that leave, over HTTP with a real engine: nothing hangs, nothing is kept for nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.harness import Live, patience, serve_here

from anycore.config import ModelConfig
from anycore.engine.engine import Engine
from anycore.engine.pace import Pace
from anycore.engine.stats import Stats
from anycore.server import child, wire

ENGINES: list[Engine] = []


def launch(boot: wire.Boot, progress: child.Progress) -> tuple[wire.Planned, child.Build]:
    """A model's engine, into which the tests can look."""
    planned, build = child.launch_model(boot, progress)

    def build_and_keep(progress: child.Progress) -> tuple[Engine, dict[str, Any]]:
        engine, card = build(progress)
        ENGINES.append(engine)
        return engine, card

    return planned, build_and_keep


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    """One sequence runs, four may wait."""
    model = ModelConfig(
        model=str(t_lm), served_model_name=("lm",), max_num_seqs=1, max_queued=4, kv_cache_memory=4 << 20
    )
    with serve_here(model, launch=launch) as live:
        yield live
    ENGINES.clear()


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "lm", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


def stats(live: Live) -> Stats:
    assert live.server is not None
    return live.server.clients[0].stats


def idle(live: Live) -> bool:
    now = stats(live)
    assert live.server is not None
    return now.running == now.waiting == live.server.clients[0].live == 0


@pytest.mark.parametrize(("n", "accepted"), [(1, 5), (3, 1)])
def test_m09_the_queue_is_bounded(live: Live, n: int, accepted: int) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: live.post("/v1/completions", body(80, n=n)), range(10)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) == accepted
    for answer in refused:
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    assert stats(live).waiting <= 4
    live.wait(lambda: idle(live), 1)
    assert live.post("/v1/completions", body(4)).status_code == 200
    assert live.get("/health").status_code == 200


def test_m09_a_full_queue_refuses_streams_with_a_status(live: Live) -> None:
    with httpx.stream("POST", live.url + "/v1/completions", json=body(300, stream=True, n=5), verify=False) as stream:
        parts = stream.iter_text()  # kept: its end would close the connection
        next(parts)
        refused = live.post("/v1/completions", body(300, stream=True))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    live.wait(lambda: idle(live), 2)


def test_m09_retry_after_is_what_the_engine_has_measured(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()  # one that has seen two sequences end in 20 s
    pace.step(time.monotonic() - 20, 0, busy=True)
    pace.step(time.monotonic(), 2, busy=False)
    monkeypatch.setattr(ENGINES[0], "_pace", pace)
    with httpx.stream("POST", live.url + "/v1/completions", json=body(300, stream=True, n=5), verify=False) as stream:
        parts = stream.iter_text()
        next(parts)
        refused = live.post("/v1/completions", body(300))
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 40  # four wait, ten seconds each
    live.wait(lambda: idle(live), 2)


def test_m09_a_deadline_holds_in_the_queue(live: Live) -> None:
    with httpx.stream("POST", live.url + "/v1/completions", json=body(300, stream=True, n=4), verify=False) as stream:
        parts = stream.iter_text()
        next(parts)
        late = live.post("/v1/completions", body(300), headers={"x-request-timeout": "0.02"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    live.wait(lambda: idle(live), 2)
    assert stats(live).blocks_free == stats(live).blocks


def leave(live: Live, streamed: bool, n: int, prompt: Any) -> None:
    """Begin a long request and close the connection after a moment."""
    asked = body(400, stream=streamed, n=n) | {"prompt": prompt}
    try:
        with httpx.stream(
            "POST", live.url + "/v1/completions", json=asked, timeout=30 if streamed else 0.1, verify=False
        ) as stream:
            parts = stream.iter_text()
            for _ in range(3):
                next(parts)
    except httpx.ReadTimeout:
        assert not streamed


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_m10_a_client_that_leaves_frees_all(live: Live, streamed: bool, n: int) -> None:
    alone = live.post("/v1/completions", body(8)).json()["choices"][0]["text"]
    live.wait(lambda: idle(live), 2)
    before = stats(live).aborted
    leave(live, streamed, n, "a")
    live.wait(lambda: idle(live), 1)
    assert stats(live).aborted == before + n
    assert stats(live).blocks_free == stats(live).blocks
    assert live.post("/v1/completions", body(8)).json()["choices"][0]["text"] == alone


def test_m10_leaving_the_queue_or_in_the_middle_of_a_prompt(live: Live) -> None:
    alone = live.post("/v1/completions", body(120)).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        neighbour = pool.submit(live.post, "/v1/completions", body(120))
        leavers = [pool.submit(leave, live, False, 1, [5] * 90) for _ in range(3)]
        for leaver in leavers:
            leaver.result()
        assert neighbour.result().json()["choices"][0]["text"] == alone
    live.wait(lambda: idle(live), 1)
    assert stats(live).blocks_free == stats(live).blocks


def test_m10_fifty_in_a_row(live: Live) -> None:
    started = time.monotonic()
    for _ in range(50):
        leave(live, True, 1, "a")
    live.wait(lambda: idle(live), 1)
    assert stats(live).blocks_free == stats(live).blocks
    assert live.post("/v1/completions", body(4)).status_code == 200
    assert time.monotonic() - started < 15 * patience()
