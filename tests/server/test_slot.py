"""Engines that are replaced while requests run: deaths, stalled steps, reloads, unloading and moving.

Engines are scripted and, like the server, in processes of their own, but where a test says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.fake_child import scripted
from server.harness import Live, serve_here, serve_scripted

from anycore.config import ModelConfig, ServerConfig
from anycore.server.app import create_app


@pytest.fixture(scope="module")
def shared(t_lm: Path) -> Iterator[Live]:
    """A server whose engines take half a second to load."""
    with serve_scripted(t_lm, "step=0.01", "load=0.5", "max_num_seqs=8", "max_queued=64") as live:
        yield live


def ask(live: Live, tokens: int, model: str = "lm") -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
    return live.post("/v1/completions", body)


def streamed(live: Live, tokens: int, model: str = "lm", begun: threading.Event | None = None) -> str:
    """All events of a stream; with the first one it has begun."""
    body = {"model": model, "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    text = ""
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30, verify=False) as response:
        for part in response.iter_text():
            text += part
            if begun is not None:
                begun.set()
    return text


def begin(live: Live, pool: ThreadPoolExecutor, tokens: int) -> Future[str]:
    """A stream that has begun. Asking the server what runs may come too late for a short one."""
    begun = threading.Event()
    stream = pool.submit(streamed, live, tokens, begun=begun)
    assert begun.wait(30)
    return stream


def entry(live: Live, place: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = live.get("/ready").json()["models"][place]
    return found


def running(live: Live) -> float:
    found = re.findall(r"^anycore:num_requests_running{[^}]*} (\S+)$", live.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_o01_a_killed_engine_is_restarted_and_its_neighbour_is_undisturbed(t_lm: Path) -> None:
    with (
        serve_scripted(t_lm, "step=0.02", names="a,b", tasks="generate,generate") as live,
        ThreadPoolExecutor(8) as pool,
    ):
        first, second = sorted(live.engines())
        long = [pool.submit(streamed, live, 300, model) for model in ("a", "b")]
        whole = pool.submit(ask, live, 300, "a")
        live.wait(lambda: running(live) == 3, 5)
        os.kill(first, signal.SIGKILL)  # the engines start in the order of the models
        assert '"engine_dead"' in long[0].result(10)
        assert whole.result(10).status_code == 503
        assert whole.result().json()["error"]["code"] == "engine_dead"
        live.wait_ready()
        assert "[DONE]" in long[1].result(20)
        assert second in live.engines()
        assert first not in live.engines()
        assert len(live.engines()) == 2
        assert ask(live, 3, "a").status_code == 200


def test_restarts_are_counted_and_end_with_the_server(t_lm: Path) -> None:
    with serve_scripted(t_lm, "step=0.01", engine_restarts=2) as live:
        for restart in range(3):
            live.wait_ready()
            assert ask(live, 2).status_code == 200  # so that the next one comes without a delay
            (engine,) = live.engines()
            os.kill(engine, signal.SIGKILL)
            if restart < 2:
                live.wait(lambda gone=engine: gone not in live.engines() and len(live.engines()) == 1, 10)  # type: ignore[misc]
        assert live.exit_code(10) == 1
    said = "".join(live.output)
    assert "restart 2 of at most 2 an hour" in said
    assert "2 restarts within an hour (--engine-restarts): giving up" in said
    assert "Traceback" not in said


def test_while_it_restarts_the_model_is_degraded_and_the_server_lives(t_lm: Path) -> None:
    with serve_scripted(t_lm, "load=1.5") as live:
        os.kill(live.engines()[0], signal.SIGKILL)
        live.wait(lambda: entry(live)["phase"] == "degraded", 5)
        live.wait(lambda: entry(live).get("percent", 0) > 0, 10)
        now = entry(live)
        assert now["code"] == "engine_dead"
        assert "SIGKILL" in now["reason"]
        assert now["seconds"] >= 0
        assert live.get("/health").status_code == 200
        ready = live.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "model_degraded")
        refused = ask(live, 2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_restarting")
        assert refused.headers["retry-after"]
        live.wait_ready()
        assert ask(live, 2).status_code == 200


def test_a_stalled_step_is_logged_and_ends_in_a_restart(t_lm: Path) -> None:
    with serve_scripted(t_lm, "hang_step=5", step_timeout=2.0) as live:
        (engine,) = live.engines()
        answer = ask(live, 50)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "step_stalled")
        live.wait(lambda: engine not in live.engines(), 5)
        live.wait_ready()
        assert ask(live, 3).status_code == 200
        said = "".join(live.output)
        assert re.search(r"no step has ended for \d+ s \(--step-timeout 2\): step 5, 1 running, 0 waiting: text-", said)
        assert "fake_child.py" in said  # where it stood


def test_a_reload_switches_without_dropping_a_request(shared: Live, tmp_path_factory: pytest.TempPathFactory) -> None:
    live, other = shared, tmp_path_factory.mktemp("other")
    (other / "model.safetensors").touch()
    with ThreadPoolExecutor(8) as pool:
        (first,) = live.engines()
        long = pool.submit(streamed, live, 200)
        answers = [pool.submit(ask, live, 10) for _ in range(40)]
        done = live.post("/v1/models/lm/reload", {"checkpoint": str(other)})
        assert done.status_code == 200
        assert done.json()["phase"] == "ready"
        assert {answer.result().status_code for answer in answers} == {200}
        assert "[DONE]" in long.result(20)
        assert live.get("/v1/models/lm").json()["checkpoint"] == str(other)
        live.wait(lambda: len(live.engines()) == 1, 5)
        assert first not in live.engines()


def test_a_reload_reads_the_small_files_anew(t_lm: Path, tmp_path: Path) -> None:
    """A folder that was synchronised brings its template and its sampling defaults along with its weights."""
    folder = tmp_path / "model"
    shutil.copytree(t_lm, folder)
    model = ModelConfig(model=str(folder), served_model_name=("lm",), backend="cpu", kv_cache_memory=8 << 20)
    asked = {"model": "lm", "messages": [{"role": "user", "content": "Hi"}]}
    with serve_here(model) as live:

        def seen() -> tuple[Any, Any]:
            tokens = live.post("/tokenize", asked).json()["tokens"]
            return tokens, live.get("/v1/models/lm").json()["sampling_defaults"]

        def renderer() -> Any:
            assert live.server is not None
            return live.server.served[0].renderer

        before, first = seen(), renderer()
        assert live.post("/v1/models/lm/reload").status_code == 200
        assert renderer() is first  # nothing has changed
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        (folder / "generation_config.json").write_text('{"temperature": 0.25}')
        assert seen() == before
        assert live.post("/v1/models/lm/reload").status_code == 200
        tokens, defaults = seen()
        assert tokens == renderer().tokenizer.encode("Hi!", add_special_tokens=False)
        assert defaults["temperature"] == 0.25
        (folder / "chat_template.jinja").unlink()
        (folder / "tokenizer.json").write_text("{")
        assert live.post("/v1/models/lm/reload").status_code >= 400
        assert seen() == (tokens, defaults)


def test_a_reload_that_fails_keeps_what_is_served(shared: Live, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    live = shared
    engines = live.engines()
    failed = live.post("/v1/models/lm/reload", {"checkpoint": str(tmp_path / "empty")})
    assert failed.status_code == 400
    assert failed.json()["error"]["code"] == "weights_damaged"
    assert "holds no weights" in failed.json()["error"]["message"]
    assert live.engines() == engines
    assert entry(live)["code"] == "ready"
    assert ask(live, 3).status_code == 200
    assert live.post("/v1/models/lm/reload").status_code == 200  # what is served has not become the failed one


def test_where_two_do_not_fit_requests_wait_for_the_switch(t_lm: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with (
        serve_scripted(t_lm, "step=0.01", "load=0.5", "alone=1", "max_num_seqs=8", "max_queued=64") as live,
        ThreadPoolExecutor(16) as pool,
    ):
        for body, status in (({}, 200), ({"checkpoint": str(tmp_path / "empty")}, 400)):
            (first,) = live.engines()
            long = begin(live, pool, 200)  # long enough for what drains to be seen
            change = pool.submit(live.post, "/v1/models/lm/reload", body)
            live.wait(lambda: entry(live)["phase"] == "draining", 5)
            answers = [pool.submit(ask, live, 5) for _ in range(8)]
            assert change.result().status_code == status
            assert {answer.result().status_code for answer in answers} == {200}
            assert "[DONE]" in long.result()
            assert first not in live.engines()


def test_one_change_at_a_time(shared: Live) -> None:
    live = shared
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(live.post, "/v1/models/lm/reload")
        live.wait(lambda: entry(live)["code"] == "reloading", 5)
        assert entry(live)["phase"] == "ready"
        for what in ("reload", "unload", "load"):
            other = live.post(f"/v1/models/lm/{what}")
            assert what == "load" or (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
        assert change.result().status_code == 200
        assert live.post("/v1/models/none/reload").status_code == 404


def test_an_engine_that_dies_during_a_reload_is_followed_by_the_new_one(shared: Live) -> None:
    live = shared
    with ThreadPoolExecutor(1) as pool:
        live.wait(lambda: len(live.engines()) == 1, 5)
        (first,) = live.engines()
        change = pool.submit(live.post, "/v1/models/lm/reload")
        live.wait(lambda: len(live.engines()) == 2, 10)
        os.kill(first, signal.SIGKILL)
        live.wait(lambda: entry(live)["phase"] == "degraded", 5)
        assert change.result().status_code == 200
        assert len(live.engines()) == 1
        assert ask(live, 3).status_code == 200


def test_an_unloaded_model_takes_nothing_until_it_is_loaded(shared: Live) -> None:
    live = shared
    with ThreadPoolExecutor(1) as pool:
        long = begin(live, pool, 50)
        assert live.post("/v1/models/lm/unload").json()["phase"] == "unloaded"
        assert "[DONE]" in long.result()
        assert live.engines() == []
        refused = ask(live, 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unloaded")
        assert live.get("/ready").status_code == 200  # as it was asked for
        assert live.get("/ready?model=lm").status_code == 503
        assert live.post("/v1/models/lm/load").json()["phase"] == "ready"
        assert live.post("/v1/models/lm/load").status_code == 200  # it is
        assert ask(live, 3).status_code == 200


def test_an_idle_model_is_unloaded_and_comes_back_for_a_request(t_lm: Path) -> None:
    with (
        serve_scripted(t_lm, "load=0.2", "max_num_seqs=8", keep_alive="0.5") as live,
        ThreadPoolExecutor(8) as pool,
    ):
        for _ in range(2):
            live.wait(lambda: entry(live)["phase"] == "unloaded", 10)
            assert entry(live)["code"] == "idle"
            assert live.engines() == []
            answers = [pool.submit(ask, live, 3) for _ in range(8)]
            assert {answer.result().status_code for answer in answers} == {200}
            assert len(live.engines()) == 1


def test_a_move_loads_there_and_drops_here(shared: Live) -> None:
    live = shared
    with ThreadPoolExecutor(1) as pool:
        long = begin(live, pool, 50)
        assert live.post("/v1/models/lm/move", {"backend": "elsewhere", "device": 1}).status_code == 200
        assert "[DONE]" in long.result()
        live.wait(lambda: len(live.engines()) == 1, 5)
        assert live.get("/v1/models/lm").json()["backend"] == "elsewhere"
        assert live.post("/v1/models/lm/move", {"device": 1}).status_code in (400, 422)


def test_o07_a_drain_ends_what_waits_for_an_engine(t_lm: Path) -> None:
    with serve_scripted(t_lm, "load=2", keep_alive="0.3") as live, ThreadPoolExecutor(1) as pool:
        live.wait(lambda: entry(live)["phase"] == "unloaded", 10)
        waiting = pool.submit(ask, live, 3)
        live.wait(lambda: len(live.engines()) == 1, 10)
        live.signal(signal.SIGTERM)
        assert waiting.result().json()["error"]["code"] == "shutting_down"
        assert live.exit_code(5) == 0


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_changes_are_for_operators(t_lm: Path, keys: tuple[str, ...]) -> None:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    with serve_here(model, launch=scripted(str(t_lm)), keys=keys) as live:
        allowed = {"headers": {"Authorization": "Bearer secret"}} if keys else {}
        assert live.post("/v1/models/lm/unload", **allowed).status_code == 200
        if keys:
            assert live.post("/v1/models/lm/load").status_code == 401


@pytest.mark.parametrize(("host", "status"), [("203.0.113.7", 403), ("127.0.0.1", 404), ("::1", 404)])
def test_without_keys_changes_are_for_this_machine(host: str, status: int) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(ServerConfig(), []), client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/models/none/unload")

    assert asyncio.run(ask()).status_code == status
