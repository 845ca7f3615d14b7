"""/v1/chat/completions over HTTP: shape of streams, usage, forms of content, templates, limits, defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.answers import error_of, events_of, ok, streamed_text
from server.harness import Live
from transformers import AutoTokenizer

HI = [{"role": "user", "content": "Hi"}]


def post(api: httpx.Client, messages: Any = HI, **body: Any) -> httpx.Response:
    return api.post("/v1/chat/completions", json={"model": "lm", "messages": messages} | body)


def prompt_tokens(api: httpx.Client, messages: Any, **body: Any) -> int:
    return int(ok(post(api, messages, max_tokens=1, **body))["usage"]["prompt_tokens"])


# --- A03: usage in the stream ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_a03_no_usage_unless_asked_for(api: httpx.Client, options: Any) -> None:
    events = events_of(post(api, stream=True, max_tokens=4, stream_options=options))
    assert all(event.get("usage") is None for event in events)
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("n", [1, 2])
def test_a03_usage_comes_once_at_the_end(api: httpx.Client, n: int) -> None:
    body = {"max_tokens": 5, "n": n, "seed": 1, "ignore_eos": True}
    *chunks, last = events_of(post(api, stream=True, stream_options={"include_usage": True}, **body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    whole = ok(post(api, **body))["usage"]
    assert last["usage"]["completion_tokens"] == 5 * n == whole["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["prompt_tokens"]
    assert last["usage"]["total_tokens"] == whole["total_tokens"]


def test_a03_usage_in_every_chunk(api: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(post(api, stream=True, max_tokens=5, ignore_eos=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a03_stream_options_need_a_stream(api: httpx.Client) -> None:
    error_of(post(api, stream_options={"include_usage": True}), 400, "stream_options")
    error_of(post(api, stream=True, stream_options={"include_usage": "yes"}), 400, "stream_options.include_usage")


# --- A04: the end of a stream ---------------------------------------------------------------------------------------


def check_stream(events: list[Any], n: int, reason: str) -> None:
    for key in ("id", "created", "model"):
        assert len({event[key] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for i in range(n):
        choices = [c for event in events for c in event["choices"] if c["index"] == i]
        assert all("finish_reason" in choice for choice in choices)
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == reason
        assert choices[-1]["delta"] == {}
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not [c for c in choices[1:] if "role" in c["delta"]]


def test_a04_three_choices_to_the_limit(api: httpx.Client) -> None:
    body = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 5, "ignore_eos": True}
    events = events_of(post(api, stream=True, **body))
    check_stream(events, 3, "length")
    whole = ok(post(api, **body))["choices"]
    assert [streamed_text(events, i) for i in range(3)] == [c["message"]["content"] for c in whole]
    assert [c["finish_reason"] for c in whole] == ["length"] * 3


@pytest.mark.parametrize("tokens", [1, 4])
def test_a04_an_end_by_eos(echo: Live, tokens: int) -> None:
    body = {"model": "say", "messages": HI, "max_tokens": 100, "cache_salt": f"tokens={tokens}"}
    events = events_of(echo.post("/v1/chat/completions", {**body, "stream": True}))
    check_stream(events, 1, "stop")
    choice = ok(echo.post("/v1/chat/completions", body))["choices"][0]
    assert streamed_text(events) == choice["message"]["content"] == "user\nHi\nassistant\n"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def test_a04_one_choice_stops_while_others_go_on(api: httpx.Client) -> None:
    body = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    whole = ok(post(api, **body))["choices"]
    texts = [c["message"]["content"] for c in whole]
    stop = next(t[i : i + 2] for t in texts for i in range(5, 20) if sum(t[i : i + 2] in u for u in texts) == 1)
    stopped = ok(post(api, **body, stop=[stop]))
    for before, after in zip(texts, stopped["choices"], strict=True):
        found = stop in before
        assert after["finish_reason"] == ("stop" if found else "length")
        assert after["message"]["content"] == (before[: before.index(stop)] if found else before)
    counted = sum(len(c["token_ids"]) for c in stopped["choices"])
    assert stopped["usage"]["completion_tokens"] == counted < 90


# --- A06: log-probabilities -----------------------------------------------------------------------------------------


def test_a06_logprobs_of_chat(api: httpx.Client) -> None:
    body = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 20, "return_token_ids": True}
    whole = ok(post(api, **body))["choices"][0]
    entries = whole["logprobs"]["content"]
    assert len(entries) == len(whole["token_ids"])
    for entry in entries:
        assert -9999.0 <= entry["logprob"] <= 0
        assert 1 <= len(entry["top_logprobs"]) <= 20
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
        assert all(0 <= b <= 255 for b in entry["bytes"])
    text = b"".join(bytes(e["bytes"]) for e in entries).decode("utf-8", "replace")
    assert text.startswith(whole["message"]["content"][:3])
    events = events_of(post(api, stream=True, **body))
    streamed = [e for event in events for c in event["choices"] for e in (c["logprobs"] or {"content": []})["content"]]
    assert streamed == entries


def test_a06_masked_alternatives_are_floored(echo: Live) -> None:
    body = {"model": "say", "messages": HI, "logprobs": True, "top_logprobs": 2}
    entries = ok(echo.post("/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert {top["logprob"] for entry in entries for top in entry["top_logprobs"]} == {-0.5, -9999.0}


def test_logprobs_need_their_switch(api: httpx.Client) -> None:
    assert ok(post(api, max_tokens=1))["choices"][0]["logprobs"] is None
    assert ok(post(api, max_tokens=1, logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    error_of(post(api, top_logprobs=2), 400, "top_logprobs")
    for wrong in (-1, 21, 2 * 10**9, "5"):
        error_of(post(api, logprobs=True, top_logprobs=wrong), 400, "top_logprobs")
    error_of(post(api, logprobs=5), 400, "logprobs")


# --- A08: forms of content ------------------------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "42"}


def test_a08_an_assistant_without_content(api: httpx.Client) -> None:
    turn = {"role": "assistant", "tool_calls": [CALL]}
    counts = {
        prompt_tokens(api, [*HI, {**turn, **content}, RESULT])
        for content in ({"content": None}, {}, {"content": ""}, {"content": []})
    }
    assert len(counts) == 1
    ok(post(api, [*HI, {"role": "assistant", "content": "x", "tool_calls": None}, RESULT], max_tokens=1))


def test_a08_strings_and_parts(api: httpx.Client) -> None:
    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    plain = ok(post(api, **body))
    parts = ok(post(api, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], **body))
    assert parts["prompt_token_ids"] == plain["prompt_token_ids"]
    assert parts["choices"][0]["message"] == plain["choices"][0]["message"]
    two = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}]
    joined = [{"role": "user", "content": "Hi\nyou"}]
    assert ok(post(api, two, **body))["prompt_token_ids"] == ok(post(api, joined, **body))["prompt_token_ids"]


def test_a08_content_that_cannot_be_read(api: httpx.Client) -> None:
    for content in (None, [], 5, {"text": "Hi"}):
        error_of(post(api, [{"role": "user", "content": content}]), 400, "messages[0].content")
    error_of(post(api, [*HI, {"role": "user"}]), 400, "messages[1].content")
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    error = error_of(post(api, [{"role": "user", "content": [{"type": "text", "text": "Hi"}, image]}]), 400)
    assert "image_url" in error["message"]
    assert error["param"].startswith("messages[0].content")


# --- A10: limits ----------------------------------------------------------------------------------------------------


def test_a10_both_names_of_the_limit(api: httpx.Client) -> None:
    for limits in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert ok(post(api, ignore_eos=True, **limits))["usage"]["completion_tokens"] == 3
    error = error_of(post(api, max_tokens=3, max_completion_tokens=4), 400)
    assert "max_tokens" in error["message"]
    assert "max_completion_tokens" in error["message"]
    for name in ("max_tokens", "max_completion_tokens"):
        for wrong in (0, -1, 10**12, "10", 2.5, True):
            error_of(post(api, **{name: wrong}), 400, name)


def test_a10_over_the_window(api: httpx.Client) -> None:
    used = prompt_tokens(api, HI)
    ok(post(api, model="short", max_tokens=96 - used, ignore_eos=True, top_k=1))
    error = error_of(post(api, model="short", max_tokens=97 - used), 400, "max_tokens", "context_length_exceeded")
    assert "96" in error["message"]
    assert str(97 - used) in error["message"]
    long = [{"role": "user", "content": "щ" * 1000}]
    error = error_of(post(api, long, model="short"), 400, code="context_length_exceeded")
    assert "96" in error["message"]


def test_a10_no_limit_goes_to_the_end_of_the_window(api: httpx.Client) -> None:
    got = ok(post(api, model="short", ignore_eos=True, temperature=0))
    assert got["choices"][0]["finish_reason"] == "length"
    assert got["usage"]["total_tokens"] == 96


# --- A13, O04: templates --------------------------------------------------------------------------------------------


def test_a13_chat_ids_are_those_of_hugging_face(api: httpx.Client, t_lm: Path) -> None:
    reference = AutoTokenizer.from_pretrained(t_lm)
    talk = [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Yes"}]
    for messages, options in (
        (talk[:2], {}),
        (talk, {}),
        (talk, {"add_generation_prompt": False}),
        (talk, {"continue_final_message": True}),
    ):
        generation = options.get("add_generation_prompt", not options.get("continue_final_message", False))
        expected = reference.apply_chat_template(
            messages, tokenize=True, return_dict=False, **{**options, "add_generation_prompt": generation}
        )
        got = ok(post(api, messages, max_tokens=1, return_token_ids=True, **options))
        assert got["prompt_token_ids"] == expected
        assert got["usage"]["prompt_tokens"] == len(expected)
        counted = ok(api.post("/tokenize", json={"model": "lm", "messages": messages, **options}))
        assert counted["tokens"] == expected
        assert counted["count"] == len(expected)


def test_echo_and_continue(api: httpx.Client) -> None:
    messages = [*HI, {"role": "assistant", "content": "Paris is"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "continue_final_message": True}
    plain = ok(post(api, **body))["choices"][0]["message"]["content"]
    assert ok(post(api, **body, echo=True))["choices"][0]["message"]["content"] == "Paris is" + plain
    assert streamed_text(events_of(post(api, **body, echo=True, stream=True))) == "Paris is" + plain
    error_of(post(api, **body, add_generation_prompt=True), 400, "continue_final_message")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/tokenize"])
def test_o04_templates_of_requests_are_refused(api: httpx.Client, path: str) -> None:
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    body = {"model": "lm", "messages": HI}
    error_of(api.post(path, json={**body, "chat_template": bomb}), 400, "chat_template")
    for name in ("chat_template", "messages", "tools", "tokenize", "add_generation_prompt"):
        response = api.post(path, json={**body, "chat_template_kwargs": {name: bomb}})
        error_of(response, 400, f"chat_template_kwargs.{name}")
    ok(api.post(path, json={**body, "chat_template_kwargs": {"enable_thinking": False}}))
    for wrong in ([], "x", 5):
        error_of(api.post(path, json={**body, "chat_template_kwargs": wrong}), 400, "chat_template_kwargs")


# --- S09: defaults --------------------------------------------------------------------------------------------------


def test_s09_precedence(api: httpx.Client) -> None:
    body: dict[str, Any] = {"max_tokens": 20, "seed": 3, "ignore_eos": True}

    def content(model: str, **more: Any) -> str:
        return str(ok(post(api, **{"model": model, **body, **more}))["choices"][0]["message"]["content"])

    greedy, drawn = content("lm", temperature=0), content("lm")
    assert greedy != drawn
    assert content("lm-file") == greedy  # its file says top_k 1
    assert content("lm-file", top_k=None, temperature=None) == greedy  # null is absent
    assert content("lm-file", top_k=0, temperature=1) == drawn  # the request beats the file
    assert content("lm-none") == drawn  # --generation-config none
    assert content("lm-flag") == greedy  # the flag beats the file: temperature 0
    assert content("lm-flag", temperature=1) == drawn  # the request beats the flag
    assert ok(post(api, model="lm-flag", ignore_eos=True))["usage"]["completion_tokens"] == 3
    assert ok(post(api, model="lm-flag", ignore_eos=True, max_tokens=7))["usage"]["completion_tokens"] == 7


# --- the rest -------------------------------------------------------------------------------------------------------


def test_fields_that_change_nothing_are_accepted(api: httpx.Client) -> None:
    before = api.get("/metrics").text
    body = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    ok(post(api, [{**HI[0], "name": "Ada"}], max_tokens=1, **body, tools=[], tool_choice="auto"))
    assert counter(api.get("/metrics").text) == counter(before)


def counter(metrics: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith("anycore:unknown_request_fields_total"))
    return float(line.split()[-1])


def test_a11_unknown_fields_are_counted(api: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    before = counter(api.get("/metrics").text)
    ok(post(api, max_tokens=1, max_token=5))
    assert counter(api.get("/metrics").text) == before + 1
    assert "max_token" in caplog.text


def test_fields_that_are_not_built_are_refused_by_name(api: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for name, value in (
        ("tools", [tool]),  # this model's template shows none
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("thinking_token_budget", 5),
    ):
        error_of(post(api, **{name: value}), 400, name)
    ok(post(api, max_tokens=1, tools=[tool], tool_choice="none"))
    ok(post(api, max_tokens=1, response_format={"type": "text"}, modalities=["text"]))


def test_ids_and_names_of_answers(api: httpx.Client) -> None:
    got = ok(post(api, max_tokens=1, request_id="mine"))
    assert got["id"] == "chatcmpl-mine"
    assert got["model"] == "lm"
    response = post(api, max_tokens=1)
    assert response.json()["id"] == "chatcmpl-" + response.headers["x-request-id"]


def test_prompt_is_returned_when_asked_for(api: httpx.Client) -> None:
    got = ok(post(api, max_tokens=1, return_prompt_text=True, prompt_logprobs=1, return_token_ids=True))
    assert got["prompt_text"] == "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(got["prompt_logprobs"]) == len(got["prompt_token_ids"]) == got["usage"]["prompt_tokens"]
    first = events_of(post(api, max_tokens=1, return_prompt_text=True, return_token_ids=True, stream=True))[0]
    assert first["prompt_text"] == got["prompt_text"]
    assert first["prompt_token_ids"] == got["prompt_token_ids"]


def test_tool_calls_of_the_past_must_be_readable(api: httpx.Client) -> None:
    for call in ({}, {"function": {}}, {"function": {"name": "f", "arguments": "{"}}, "x"):
        messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]
        assert error_of(post(api, messages), 400)["param"].startswith("messages[1].tool_calls[0]")


def test_nothing_but_unicode_is_read(api: httpx.Client) -> None:
    for body in (
        {"messages": [{"role": "user", "content": "a\ud800"}]},
        {"messages": HI, "stop": ["\udfff"]},
        {"messages": HI, "chat_template_kwargs": {"a": ["\ud800"]}},
        {"messages": HI, "\ud800": 1},
    ):
        content = json.dumps({"model": "lm", **body})
        response = api.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        error_of(response, 400, code="invalid_json")


def test_tool_arguments_within_json_text(api: httpx.Client) -> None:
    for arguments in (
        '{"a": "\\ud800"}',
        '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"a": ' + "[" * 700 + "]" * 700 + "}",
    ):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        response = post(api, [*HI, {"role": "assistant", "tool_calls": [call]}, RESULT], max_tokens=1)
        assert response.status_code in (200, 400), response.text
