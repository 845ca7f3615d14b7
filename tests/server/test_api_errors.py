"""What is wrong is refused at the door, in the envelope, quickly, and the next request is answered as before."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from server.answers import error_of, ok
from server.conftest import served
from server.harness import serve_here

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "lm", "messages": HI, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def raw(api: httpx.Client, path: str, content: str | bytes, kind: str = "application/json") -> httpx.Response:
    return api.post(path, content=content, headers={"content-type": kind})


@pytest.fixture(autouse=True)
def alive(api: httpx.Client) -> Any:
    """ALIVE: whatever a test sends, health is 200 and a greedy request gives the same tokens as before."""
    before = ok(api.post(CHAT, json=GREEDY))["choices"][0]["token_ids"]
    yield
    assert api.get("/health").status_code == 200
    assert ok(api.post(CHAT, json=GREEDY))["choices"][0]["token_ids"] == before


# --- A11: the envelope ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, "/v1/embeddings", "/v1/rerank", "/score", "/tokenize", "/detokenize"]
)
def test_a11_bodies_that_are_no_request(api: httpx.Client, path: str) -> None:
    for content in ("{", "", "[]", "5", '"a"', "null", b"\xff\xfe", '{"model": "lm",}', "{'model': 'lm'}"):
        error_of(raw(api, path, content), 400)
    error_of(raw(api, path, "{}", "text/plain"), 415)
    error_of(raw(api, path, "model=lm", "application/x-www-form-urlencoded"), 415)
    error_of(api.get(path), 405)
    error_of(api.post(path + "/nothing", json={}), 404)


def test_a11_the_mark_that_windows_writes_before_utf_8_is_no_part_of_a_body(api: httpx.Client) -> None:
    content = json.dumps(GREEDY).encode("utf-8-sig")
    assert (
        ok(raw(api, CHAT, content))["choices"][0]["token_ids"]
        == ok(api.post(CHAT, json=GREEDY))["choices"][0]["token_ids"]
    )
    error_of(raw(api, CHAT, content.replace(b"{", b"\xef\xbb\xbf{", 1)), 400)  # two of them are


def test_a11_fields_of_chat(api: httpx.Client) -> None:
    for body, param in (
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"temperature": -0.7}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"model": 5}, "model"),
        ({"n": None, "seed": "x"}, "seed"),
        ({"documents": [1]}, "documents[0]"),
        ({"documents": "x"}, "documents"),
        ({"stream_options": 5}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
    ):
        error_of(api.post(CHAT, json={"model": "lm", "messages": HI, **body}), 400, param)
    error_of(
        raw(api, CHAT, '{"model": "lm", "messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}'), 400
    )
    error_of(raw(api, CHAT, '{"model": "lm", "messages": [{"role": "user", "content": "Hi"}], "top_p": Infinity}'), 400)


def test_a11_strict_refuses_unknown_fields(t_lm: Any) -> None:
    with serve_here(served(t_lm, "lm"), strict=True) as live:
        error_of(live.post(CHAT, {**GREEDY, "max_token": 5}), 400, "max_token")
        ok(live.post(CHAT, {**GREEDY, "user": "me", "metadata": {}, "store": True}))


def test_o09_names(api: httpx.Client) -> None:
    error = error_of(api.post(CHAT, json={**GREEDY, "model": "LM"}), 404, "model", "model_not_found")
    assert "lm" in error["message"]
    for wrong in ("", "../x", "x" * 10_000):
        error_of(api.post(CHAT, json={**GREEDY, "model": wrong}), 404, "model", "model_not_found")
    error_of(api.post(CHAT, json={"messages": HI}), 400, "model")  # several models generate


# --- O02: absurd values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**6}, "n"),
        ({"best_of": 21}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 2 * 10**9}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": 999999, "top_p": -1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 2**20}, "stop[0]"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [448]}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(20_000)}}, "logit_bias"),
        ({"min_tokens": 10**9}, "min_tokens"),
        ({"prompt": ["a"] * 3000}, "prompt"),
    ],
)
def test_o02_absurd_values_are_refused_at_once(api: httpx.Client, body: dict[str, Any], param: str) -> None:
    content = json.dumps({"model": "lm", "prompt": "a", **body})
    began = time.process_time()  # of client, server and engine; milliseconds, but machines differ
    response = raw(api, COMPLETIONS, content)
    assert time.process_time() - began < 10
    error_of(response, 400, param)


def test_o02_deep_and_large_bodies(api: httpx.Client) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    error_of(raw(api, CHAT, f'{{"model": "lm", "messages": {deep}}}'), 400)
    error_of(
        raw(api, CHAT, json.dumps({**GREEDY, "chat_template_kwargs": {"a": json.loads("[" * 150 + "]" * 150)}})), 400
    )
    error_of(raw(api, CHAT, json.dumps({**GREEDY, "x": "x" * 33 * 2**20})), 413)
    many = {f"h{i}": "x" for i in range(1000)}
    assert api.post(CHAT, json=GREEDY, headers=many).status_code in (400, 431)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
        (COMPLETIONS, {"stop": ["a"] * 5}, "stop"),
        (COMPLETIONS, {"stop_token_ids": [5] * 129}, "stop_token_ids"),
        (COMPLETIONS, {"bad_words": ["a"] * 257}, "bad_words"),
        (COMPLETIONS, {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt"),
        ("/v1/detokenize", {"tokens": [5] * (2**20 + 1)}, "tokens"),
    ],
)
def test_o02_one_entry_too_many(api: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    """The lengths that docs/security.md lists."""
    error_of(raw(api, path, json.dumps({"model": "lm", "prompt": "a", **body})), 400, param)


def test_deadlines(api: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 300, "ignore_eos": True}
    error_of(api.post(CHAT, json=body, headers={"x-request-timeout": "0.001"}), 504, code="deadline_exceeded")
    ok(api.post(CHAT, json=GREEDY, headers={"x-request-timeout": "30"}))
    for wrong in ("soon", "0", "-1", "nan", "inf", ""):
        error_of(api.post(CHAT, json=GREEDY, headers={"x-request-timeout": wrong}), 400, "x-request-timeout")


def test_o06_prompts_are_logged_only_when_asked_for(
    api: httpx.Client, t_lm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    marked = {**GREEDY, "messages": [{"role": "user", "content": "MARKER"}]}
    ok(api.post(CHAT, json=marked))
    error_of(api.post(CHAT, json={**marked, "temperature": "MARKER"}), 400)
    assert "MARKER" not in caplog.text
    with serve_here(served(t_lm, "lm"), log_prompts=True) as live:
        ok(live.post(CHAT, marked))
    assert "MARKER" in caplog.text
