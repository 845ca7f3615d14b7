"""Live, ready and the rest of the operators' routes, while loading, at work and under load."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from server.fake_child import scripted
from server.harness import patience, serve_here

from anycore import __version__
from anycore.config import ModelConfig


def lm(folder: Path) -> ModelConfig:
    return ModelConfig(model=str(folder), served_model_name=("lm",))


def is_envelope(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return error.keys() == {"message", "type", "param", "code"} and bool(error["message"])


def test_o01_live_but_not_ready_while_loading(t_lm: Path) -> None:
    launch = scripted(str(t_lm), "plan=0.7", "load=0.7")
    with serve_here(lm(t_lm), launch=launch, ready=False) as live:
        phases, percents = set(), set()
        while (ready := live.get("/ready")).status_code == 503:
            health = live.get("/health")
            assert health.status_code == 200
            body = ready.json()
            assert is_envelope(ready)
            assert ready.headers["retry-after"] == "1"
            phases.add(body["models"][0]["phase"])
            percents.add(body["models"][0].get("percent"))
            if body["status"] != "ready":
                refused = live.post("/v1/completions", {"model": "lm", "prompt": "a"})
                assert refused.status_code in (503, 200)  # it may have become ready meanwhile
                assert refused.status_code == 200 or refused.json()["error"]["code"] == "model_loading"
        assert phases >= {"starting", "loading"}
        assert len(percents) > 3
        (entry,) = ready.json()["models"]
        assert entry.pop("seconds") >= 0
        assert ready.json()["status"] == "ready"
        assert entry == {"id": "lm", "phase": "ready", "code": "ready"}
        assert live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 1}).status_code == 200


def test_o01_probes_are_quick_and_free_under_load(t_lm: Path) -> None:
    with serve_here(lm(t_lm), launch=scripted(str(t_lm), "step=0.05")) as live, ThreadPoolExecutor(6) as pool:
        body = {"model": "lm", "prompt": "a", "max_tokens": 40}
        work = [pool.submit(live.post, "/v1/completions", body) for _ in range(6)]
        time.sleep(0.3)
        assert live.server is not None
        before = live.server.clients[0].stats.blocks_free
        with live.client() as client:
            seconds = []
            for _ in range(200):
                started = time.monotonic()
                response = client.get("/health")
                seconds.append(time.monotonic() - started)
                assert response.status_code == 200
                assert "x-request-id" not in response.headers
        assert sorted(seconds)[len(seconds) * 95 // 100] < 0.1 * patience()
        assert live.server.clients[0].stats.blocks_free == before
        assert {w.result().status_code for w in work} == {200}


def test_probes_answer_head_and_ping(t_lm: Path) -> None:
    with serve_here(lm(t_lm), launch=scripted(str(t_lm))) as live, live.client() as client:
        for path in ("/health", "/ready", "/ping"):
            assert client.head(path).status_code == 200
            assert client.get(path).json()["status"] == "ready"
        assert client.get("/version").json() == {"version": __version__}


def test_o01_a_dead_engine_is_told_and_the_server_ends(t_lm: Path) -> None:
    with serve_here(lm(t_lm), launch=scripted(str(t_lm), "fail_step=2"), engine_restarts=0) as live:
        answer = live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 9})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "RuntimeError" not in answer.text
        for path in ("/health", "/ready"):
            response = live.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "dead"
            assert is_envelope(response)
        live.wait(lambda: bool(live.outcome), 5)
        assert live.outcome == [1]
