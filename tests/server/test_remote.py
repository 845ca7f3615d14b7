"""Models of other servers: what is passed on, what comes back, and what both sides hear of trouble."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from server.conftest import served
from server.fake_child import scripted
from server.harness import Live, serve_here, serve_process

from anycore.config import ModelConfig
from anycore.errors import ConfigError
from anycore.server.auth import Guard
from anycore.server.beforehand import remote_keys
from anycore.server.keys import Key, hash_of, plain
from anycore.server.tally import Tally

KEYS = [
    plain("ours", "ours"),
    Key(name="capped", sha256=hash_of(b"capped"), max_tokens=5),
    Key(name="tokens", sha256=hash_of(b"tokens"), tokens_per_minute=6),
]


class Other:
    """Another server of this API; what it says depends on the request's `max_tokens` or `input`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.left = threading.Event()  # a client went away in the middle of a stream
        self.models = ["far-model", "far-vectors", "far-ranks"]
        self.url = ""

    async def list_models(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer far-key":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"data": [{"id": name, "max_model_len": 77} for name in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        what = body.get("user", "")
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        if what == "sleep":
            await asyncio.sleep(60)
        if what in ("401", "429", "404"):
            error = {"message": "refused there", "type": "some_error", "code": "there", "param": "x"}
            return web.json_response({"error": error}, status=int(what), headers={"retry-after": "9"})
        if what == "html":
            return web.Response(text="<h1>Bad gateway</h1>", status=502, content_type="text/html")
        if request.path == "/rerank" and "documents" not in body:
            return web.json_response([{"index": 0, "score": 0.5}] if body["texts"] != ["odd"] else {"a": 1})
        if request.path == "/v2/embed":
            return web.json_response({"id": "1", "meta": {"billed_units": {"input_tokens": 5}}})
        if not body.get("stream"):
            choices = [{"index": 0, "text": "ab", "finish_reason": "length"}]
            return web.json_response(
                {"id": "1", "model": body["model"], "choices": choices, "big": 2**70, "usage": usage}
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(1000 if what == "endless" else 2):
                choice = {"index": 0, "text": str(number), "finish_reason": None}
                await self._event(response, {"model": body["model"], "choices": [choice]})
                if what == "cut":
                    assert request.transport is not None
                    await asyncio.sleep(0.5)  # for the first event to have been passed on
                    request.transport.close()
                    return response
                await asyncio.sleep(0.01)
            await self._event(
                response, {"model": body["model"], "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
            )
            if body.get("stream_options", {}).get("include_usage"):
                await self._event(response, {"model": body["model"], "choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, payload: dict[str, Any]) -> None:
        data = json.dumps(payload).encode()
        await response.write(b"data: " + data[:10])  # in two pieces, as a network may
        await asyncio.sleep(0)
        await response.write(data[10:] + b"\n\n")


@contextmanager
def other_server() -> Iterator[Other]:
    other, loop = Other(), asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", other.list_models)
        app.router.add_post("/{path:.*}", other.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        other.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        await web.SockSite(runner, listener).start()
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield other
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def far(url: str, **settings: Any) -> ModelConfig:
    given = {"model": "far-model", "served_model_name": ("far",), "task": "generate", "url_api_key_env": "FAR_KEY"}
    return ModelConfig(**{**given, "url": url, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with other_server() as other:
        yield other


@pytest.fixture(scope="module")
def live(other: Other, t_lm: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAR_KEY", "far-key")
        vectors = far(other.url, model="far-vectors", served_model_name=("vectors",), task="embed")
        ranks = far(other.url, model="far-ranks", served_model_name=("ranks",), task="rerank")
        near = served(t_lm, "near")
        with serve_here(far(other.url), vectors, ranks, near, launch=scripted(str(t_lm)), guard=Guard(KEYS)) as live:
            yield live


def post(live: Live, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    body = {"model": "far", "prompt": "a", **body}
    return live.post(path, body, headers={"authorization": "Bearer ours", **headers})


def count(live: Live, name: str, model: str = "far") -> float:
    page = live.get("/metrics", headers={"Authorization": "Bearer ours"}).text
    lines = [line for line in page.splitlines() if line.startswith(f"anycore:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'model_name="{model}"' in line)


def test_a_request_is_passed_on_under_the_other_name_and_key(live: Live, other: Other) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = {"guided_regex": "a+", "temperature": 0.1, "seed": 2**63}
    answer = post(live, sent, traceparent=trace, **{"x-request-id": "mine"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["model"] == "far"
    assert str(2**70) in answer.text  # as it came
    path, headers, body = other.requests[-1]
    assert path == "/v1/completions"
    assert body == {"model": "far-model", "prompt": "a", **sent}
    assert headers["authorization"] == "Bearer far-key"
    assert (headers["traceparent"], headers["x-request-id"]) == (trace, "mine")
    assert "ours" not in str(headers)


def test_a_stream_comes_as_it_is_and_its_tokens_are_counted(live: Live, other: Other) -> None:
    before = count(live, "generation_tokens_total")
    for asks in (False, True):
        options = {"stream_options": {"include_usage": True}} if asks else {}
        answer = post(live, {"stream": True, **options})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        told = [json.loads(event) for event in events[:-1]]
        assert {event["model"] for event in told} == {"far"}
        assert ["".join(choice["text"] for choice in event["choices"]) for event in told[:2]] == ["0", "1"]
        assert any("usage" in event for event in told) is asks
        assert other.requests[-1][2]["stream_options"] == {"include_usage": True}
    assert count(live, "generation_tokens_total") == before + 4
    assert count(live, "time_to_first_token_seconds_count") >= 2


def test_routes_outside_of_v1_and_models_without_a_name(live: Live, other: Other) -> None:
    for path, body in (("/v1/embeddings", {"input": ["a"]}), ("/v2/embed", {"texts": ["a"]})):
        before = count(live, "prompt_tokens_total", "vectors")
        assert live.post(path, body, headers={"Authorization": "Bearer ours"}).status_code == 200
        assert other.requests[-1][0] == path
        assert other.requests[-1][2]["model"] == "far-vectors"  # the only one for the task
        assert count(live, "prompt_tokens_total", "vectors") == before + 5
    assert post(live, {}, "/tokenize").status_code == 200
    assert other.requests[-1][0] == "/tokenize"


def test_e12_a_bare_list_comes_back_where_texts_were_ranked(live: Live, other: Other) -> None:
    answer = post(live, {"model": "ranks", "query": "q", "texts": ["a"]}, "/rerank")
    assert (answer.status_code, answer.json()) == (200, [{"index": 0, "score": 0.5}])
    assert other.requests[-1][2]["model"] == "far-ranks"
    error = post(live, {"model": "ranks", "query": "q", "texts": ["odd"]}, "/rerank")
    assert (error.status_code, error.json()["error"]["code"]) == (502, "remote_failed")
    assert "not a JSON list" in error.json()["error"]["message"]


@pytest.mark.parametrize(
    ("what", "status", "code", "said"),
    [
        ("429", 429, "there", "refused there"),
        ("404", 404, "there", "refused there"),
        ("401", 502, "remote_key_refused", "refuses the key"),
        ("html", 502, "remote_failed", "answered with status 502 and no error of this API"),
    ],
)
def test_errors_of_the_other_server(live: Live, what: str, status: int, code: str, said: str) -> None:
    for stream in (False, True):
        answer = post(live, {"user": what, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert said in error["message"]
        if status == 429:
            assert answer.headers["retry-after"] == "9"
            assert error["param"] == "x"


def test_a_connection_that_ends_in_the_middle_is_a_last_event(live: Live) -> None:
    answer = post(live, {"user": "cut", "stream": True})
    assert answer.status_code == 200
    assert '"remote_unreachable"' in answer.text.splitlines()[-2] + answer.text.splitlines()[-1]
    assert "[DONE]" not in answer.text


def test_a_client_that_leaves_ends_the_request_there(live: Live, other: Other) -> None:
    other.left.clear()
    with httpx.stream(
        "POST", live.url + "/v1/completions", verify=False, headers={"Authorization": "Bearer ours"},
        json={"model": "far", "prompt": "a", "stream": True, "user": "endless"},
    ) as stream:  # fmt: skip
        next(stream.iter_text())
    assert other.left.wait(20)
    live.wait(lambda: count(live, "num_requests_running") == 0, 10)


def test_a_deadline_ends_it(live: Live) -> None:
    answer = post(live, {"user": "sleep"}, **{"x-request-timeout": "0.3"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 6}, "max_tokens"),
        ({"max_tokens": 6, "max_completion_tokens": 1}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 6}, "max_tokens"),
        ({"max_tokens": 6.0}, "max_tokens"),
        ({"max_completion_tokens": "6"}, "max_completion_tokens"),
    ],
)
def test_the_cap_of_a_key_holds_whichever_field_is_read_there(live: Live, asked: dict[str, Any], param: str) -> None:
    answer = post(live, asked, authorization="Bearer capped")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_cap_of_a_key_is_asked_for_where_nothing_is(live: Live, other: Other) -> None:
    for asked, sent in (({}, 5), ({"max_tokens": None}, 5), ({"max_tokens": 3}, 3)):
        assert post(live, asked, authorization="Bearer capped").status_code == 200
        assert other.requests[-1][2]["max_tokens"] == sent


def test_tokens_of_answers_from_there_are_waited_for(live: Live) -> None:
    assert post(live, {}, authorization="Bearer tokens").status_code == 200  # seven, of which the other server tells
    answer = post(live, {}, authorization="Bearer tokens")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(answer.headers["retry-after"]) <= 10


def test_keys_tasks_and_routes_are_ours(live: Live) -> None:
    assert live.post("/v1/completions", {"model": "far", "prompt": "a"}).status_code == 401
    wrong = post(live, {"input": "a"}, "/v1/embeddings")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "task_not_supported")
    assert "is passed on for generate" in wrong.json()["error"]["message"]
    near = post(live, {"model": "near", "max_tokens": 2, "prompt": [1]})
    assert near.status_code == 200
    reload = post(live, {}, "/v1/models/far/unload")
    assert (reload.status_code, reload.json()["error"]["code"]) == (400, "unsupported")


def test_what_is_said_about_it(live: Live, other: Other) -> None:
    ours = {"Authorization": "Bearer ours"}
    card = live.get("/v1/models/far", headers=ours).json()
    assert (card["backend"], card["remote"], card["support"]) == ("remote", other.url, "remote: not checked")
    assert (card["max_model_len"], card["phase"]) == (77, "ready")
    report = live.get("/v1/capabilities?model=far", headers=ours).json()
    assert report["check"]["support"] == "remote: not checked"
    assert "far-key" not in json.dumps([card, report])


def test_looks_decide_whether_it_is_ready(t_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycore.server.remote.PROBE_SECONDS", 0.1)
    monkeypatch.setattr("anycore.server.remote.AGAIN_SECONDS", 0.1)
    monkeypatch.setenv("FAR_KEY", "wrong")
    with other_server() as other:
        models = (far(other.url), served(t_lm, "near"))
        with serve_here(*models, launch=scripted(str(t_lm)), ready=False) as live:

            def entry() -> dict[str, Any]:
                found: dict[str, Any] = live.get("/ready").json()["models"][0]
                return found

            live.wait(lambda: entry()["code"] == "remote_key_refused", 10)
            assert live.get("/ready?model=far").status_code == 503
            assert live.get("/health").status_code == 200
            refused = live.post("/v1/completions", {"model": "far", "prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "remote_key_refused")
            monkeypatch.setenv("FAR_KEY", "far-key")
            live.wait_ready()
            other.models = []
            live.wait(lambda: entry()["code"] == "remote_model_missing", 10)
            other.models = ["far-model"]
            live.wait_ready()


def test_one_that_does_not_answer_keeps_nobody_from_the_others(t_lm: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    models = (far(f"http://127.0.0.1:{port}", url_api_key_env=None), served(t_lm, "near"))
    with serve_here(*models, launch=scripted(str(t_lm)), ready=False) as live:
        live.wait(lambda: live.get("/ready?model=near").status_code == 200, 20)
        assert live.post("/v1/completions", {"model": "near", "prompt": [1], "max_tokens": 2}).status_code == 200
        refused = live.post("/v1/completions", {"model": "far", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "remote_unreachable")


def test_what_a_server_does_not_start_with() -> None:
    with pytest.raises(ConfigError, match="the variable FAR_KEY"):
        remote_keys([far("http://there")], {})
    assert remote_keys([far("http://there")], {"FAR_KEY": "secret"}) == ["secret"]


# --- several fronts -----------------------------------------------------------------------------------------------

CONFIG = """
api-servers: 2
log-level: debug
models:
  - {model: far-model, served-model-name: far, task: generate, url: "URL", url-api-key-env: FAR_KEY}
  - {model: late-model, served-model-name: late, task: generate, url: "URL", url-api-key-env: FAR_KEY}
"""


def test_o01_o06_o14_fronts_look_each_for_itself_and_count_together(other: Other, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(CONFIG.replace("URL", other.url))
    with serve_process("--config", str(config), ready=False, env={"FAR_KEY": "far-key"}) as live:
        live.wait(lambda: "fronts share the port" in "".join(live.output), 60)

        def ask(name: str) -> list[httpx.Response]:
            """Requests on connections of their own, which the kernel gives to any front."""
            with ThreadPoolExecutor(8) as pool:
                body = {"model": name, "prompt": "a"}
                return list(pool.map(lambda _: live.post("/v1/completions", body), range(24)))

        assert {answer.status_code for answer in ask("far")} == {200}
        missing = ask("late")
        assert {answer.json()["error"]["code"] for answer in missing} == {"remote_model_missing"}
        assert all(answer.headers["retry-after"] for answer in missing)
        assert {live.get("/ready").status_code for _ in range(8)} == {503}
        other.models.append("late-model")
        live.wait(lambda: {answer.status_code for answer in ask("late")} == {200}, 20)
        assert {live.get("/ready").status_code for _ in range(8)} == {200}

        page = live.get("/metrics").text
        found = dict(re.findall(r"^anycore:(\w+){[^}]*model_name=\"far\"[^}]*} (\S+)$", page, re.MULTILINE))
        assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == ("120.0", "48.0")
        assert (found["num_requests_running"], found["e2e_request_latency_seconds_count"]) == ("0.0", "24.0")
        assert all(live.get("/metrics").text.count("} 48.0") == page.count("} 48.0") for _ in range(6))
        live.signal(signal.SIGTERM)
        assert live.exit_code() == 0
        assert "far-key" not in "".join(live.output)


def test_a_tally_sums_the_rows_of_all_and_forgets_those_of_a_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "tally"
    first, second = (Tally(path, front, 2) for front in range(2))
    first.add(running=2, prompt_tokens=7)
    second.add(running=1, output_tokens=5)
    second.add(running=-1, cached_tokens=3)
    for tally in (first, second):
        found = tally.stats
        counts = found.running, found.prompt_tokens, found.cached_tokens, found.output_tokens
        assert counts == (2, 7, 3, 5)
    assert Tally(path, 0, 2).stats.output_tokens == second.stats.output_tokens == 5
    assert second.stats.running == 0
