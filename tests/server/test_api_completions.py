"""/v1/completions over HTTP: characters and stop strings in streams, echo, log-probabilities, sampling, prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from server.answers import error_of, events_of, ok, streamed_text
from server.harness import Live
from transformers import AutoTokenizer

HARD = "🫠щ龜e\u0301👩‍👩‍👧"


def post(api: httpx.Client, **body: Any) -> httpx.Response:
    return api.post("/v1/completions", json={"model": "lm", **body})


def text(api: httpx.Client, **body: Any) -> str:
    return str(ok(post(api, temperature=0, **body))["choices"][0]["text"])


def say(echo: Live, prompt: str, **body: Any) -> dict[str, Any]:
    """Let the echo engine say a text; return the whole answer's choice after checking that the stream agrees."""
    asked = {"model": "say", "prompt": prompt, "max_tokens": 400, **body}
    whole = ok(echo.post("/v1/completions", asked))
    events = events_of(
        echo.post("/v1/completions", {**asked, "stream": True, "stream_options": {"include_usage": True}})
    )
    for i, choice in enumerate(whole["choices"]):
        assert streamed_text(events, i) == choice["text"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    return {**whole["choices"][0], "usage": whole["usage"], "events": events}


# --- A01: characters of several tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_a01_characters_of_several_tokens_stay_whole(echo: Live, tokens: int) -> None:
    said = say(echo, HARD, cache_salt=f"tokens={tokens}")
    assert said["text"] == HARD
    assert said["finish_reason"] == "stop"
    pieces = [c["text"] for event in said["events"] for c in event["choices"]]
    assert len(pieces) > 3
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_a01_echo_gives_the_prompt_back(api: httpx.Client, stream: bool) -> None:
    response = post(api, prompt=HARD, echo=True, max_tokens=0, stream=stream)
    got = streamed_text(events_of(response)) if stream else ok(response)["choices"][0]["text"]
    assert got == HARD


def test_a01_a_limit_inside_a_character_ends_stream_and_whole_alike(echo: Live) -> None:
    for limit in range(1, 12):
        said = say(echo, HARD, max_tokens=limit)
        assert said["finish_reason"] == "length"
        assert said["text"].rstrip("\ufffd") == HARD[: len(said["text"].rstrip("\ufffd"))]


def test_a01_streams_of_random_bytes_equal_whole_answers(api: httpx.Client) -> None:
    for seed in range(4):
        body = {"prompt": "щука", "temperature": 1.5, "seed": seed, "max_tokens": 60}
        assert streamed_text(events_of(post(api, **body, stream=True))) == ok(post(api, **body))["choices"][0]["text"]


# --- A02: stop strings ----------------------------------------------------------------------------------------------


def test_a02_stop_across_tokens(echo: Live) -> None:
    prompt = "A request is a list of tokens and щука 🫠 a count of how many are computed."
    start, end = prompt.index("kens and"), prompt.index("🫠 a c") + 4
    stop = prompt[start:end]
    for tokens in (1, 3, 7):
        said = say(echo, prompt, stop=[stop], cache_salt=f"tokens={tokens}")
        assert said["text"] == prompt[:start]
        assert (said["finish_reason"], said["stop_reason"]) == ("stop", stop)
        assert say(echo, prompt, stop=stop, cache_salt=f"tokens={tokens}")["text"] == prompt[:start]
        kept = say(echo, prompt, stop=[stop], include_stop_str_in_output=True, cache_salt=f"tokens={tokens}")
        assert kept["text"] == prompt[:end]


def test_a02_counts_no_token_after_the_stop(echo: Live) -> None:
    prompt = "The quick brown fox jumps over the lazy dog"
    counts = {
        say(echo, prompt, stop="jumps", cache_salt=f"tokens={tokens}")["usage"]["completion_tokens"]
        for tokens in (1, 3, 7)
    }
    assert len(counts) == 1
    assert counts.pop() < say(echo, prompt)["usage"]["completion_tokens"]


def test_a02_a_stop_that_never_completes_is_flushed(echo: Live) -> None:
    prompt = "The quick brown fox"
    said = say(echo, prompt, stop=[prompt[4:9] + "\u0001", "fox jumps"])
    assert (said["text"], said["finish_reason"], said["stop_reason"]) == (prompt, "stop", None)


def test_a02_the_earliest_stop_wins(echo: Live) -> None:
    assert say(echo, "one two three four", stop=["four", "three", "wo th"])["text"] == "one t"


def test_a02_stop_limits(api: httpx.Client) -> None:
    for stop, param in (
        (["a"] * 5, "stop"),
        (["a", ""], "stop[1]"),
        ([], None),
        (["a", 3], "stop[1]"),
        (3, "stop"),
        ("x" * 5000, "stop[0]"),
    ):
        response = post(api, prompt="a", stop=stop, max_tokens=1)
        if param is None:
            ok(response)
        else:
            error_of(response, 400, param)


def test_a02_text_and_token_ids_do_not_run_ahead_of_each_other(echo: Live) -> None:
    said = say(echo, "The quick brown fox", stop=["brown bear"], return_token_ids=True, logprobs=0)
    ids: list[int] = []
    for event in said["events"][:-1]:
        choice = event["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
        ids += choice["token_ids"]
    assert ids == said["token_ids"]
    assert len(ids) == said["usage"]["completion_tokens"]


# --- A06: log-probabilities -----------------------------------------------------------------------------------------


def test_a06_echo_with_logprobs_and_top_k_1(api: httpx.Client) -> None:
    choice = ok(post(api, prompt="correct horse", echo=True, logprobs=1, top_k=1, max_tokens=4))["choices"][0]
    got = choice["logprobs"]
    lengths = {len(got[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert len(lengths) == 1
    assert got["token_logprobs"][0] is None
    assert got["top_logprobs"][0] is None
    assert all(-9999.0 <= value <= 0 for value in got["token_logprobs"][1:])
    assert all(1 <= len(top) <= 2 for top in got["top_logprobs"][1:])
    assert choice["text"].startswith("correct horse")
    assert got["text_offset"][-4:][0] == len("correct horse")


@pytest.mark.parametrize("value", ["-inf", "-123456"])
def test_a06_unlikely_tokens_have_a_finite_logprob(echo: Live, value: str) -> None:
    said = say(echo, "abc", logprobs=2, cache_salt=f"logprob={value}")
    assert set(said["logprobs"]["token_logprobs"]) == {-9999.0}


def test_a06_nan_is_an_error_not_a_number(echo: Live) -> None:
    asked = {"model": "say", "prompt": "abc", "logprobs": 2, "cache_salt": "logprob=nan"}
    error_of(echo.post("/v1/completions", asked), 500, code="non_finite_output")


def test_logprobs_offsets_point_into_the_text(api: httpx.Client) -> None:
    prompt = "щука and 🫠 in Paris"
    got = ok(post(api, prompt=prompt, echo=True, logprobs=0, max_tokens=0, add_special_tokens=False))["choices"][0]
    offsets, tokens = got["logprobs"]["text_offset"], got["logprobs"]["tokens"]
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:"):
            assert prompt[offset:].startswith(token)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, ["no", "Ж"]])
def test_logprobs_offsets_are_the_same_in_a_stream(api: httpx.Client, echo: bool, stop: list[str] | None) -> None:
    """Whatever is held back, for it may become a stop, and however characters are broken."""
    body = {
        "prompt": [5, 6, 7],
        "echo": echo,
        "stop": stop,
        "logprobs": 0,
        "max_tokens": 40,
        "temperature": 1,
        "seed": 3,
    }
    whole = ok(post(api, **body))["choices"][0]
    tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
    chunks = [event["choices"][0]["logprobs"] for event in events_of(post(api, **body, stream=True))]
    assert [i for chunk in chunks for i in chunk["text_offset"]] == offsets
    assert [token for chunk in chunks for token in chunk["tokens"]] == tokens
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or whole["text"][offset:].startswith(token)


def test_prompt_logprobs_equal_those_of_echo(api: httpx.Client) -> None:
    body = {"prompt": "The quick brown fox", "max_tokens": 1, "temperature": 0}
    plain = ok(post(api, **body, prompt_logprobs=2))["choices"][0]["prompt_logprobs"]
    echoed = ok(post(api, **body, echo=True, logprobs=2, return_token_ids=True))["choices"][0]
    assert plain[0] is None
    for entry, token, value in zip(
        plain[1:], echoed["prompt_token_ids"][1:], echoed["logprobs"]["token_logprobs"][1:-1], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-5)
        assert entry[str(token)]["rank"] >= 1
    error_of(post(api, **body, prompt_logprobs=2, stream=True), 400, "prompt_logprobs")


def test_tokens_as_ids(api: httpx.Client) -> None:
    choice = ok(
        post(api, prompt="a", max_tokens=3, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    )["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


# --- prompts and choices --------------------------------------------------------------------------------------------


def test_prompts_and_choices_are_numbered_as_openai_does(echo: Live) -> None:
    asked = {"model": "say", "prompt": ["one", "two two", "three"], "n": 2, "max_tokens": 50}
    whole = ok(echo.post("/v1/completions", asked))
    texts = ["one", "one", "two two", "two two", "three", "three"]
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(texts))
    events = events_of(echo.post("/v1/completions", {**asked, "stream": True}))
    assert [streamed_text(events, i) for i in range(6)] == texts
    for i in range(6):
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == i]
        assert reasons.index("stop") == len(reasons) - 1
    assert whole["usage"]["prompt_tokens"] == sum(
        ok(echo.post("/tokenize", {"model": "say", "prompt": p}))["count"] for p in asked["prompt"]
    )


def test_more_prompts_than_run_at_once(echo: Live) -> None:
    prompts = [f"number {i}" for i in range(600)]
    whole = ok(echo.post("/v1/completions", {"model": "say", "prompt": prompts, "max_tokens": 50}))
    assert [c["text"] for c in whole["choices"]] == prompts


def test_prompt_forms_give_the_same(api: httpx.Client) -> None:
    ids = ok(api.post("/tokenize", json={"model": "lm", "prompt": "Paris is"}))["tokens"]
    texts = {text(api, prompt=prompt, max_tokens=8) for prompt in ("Paris is", ["Paris is"], ids, [ids])}
    assert len(texts) == 1


def test_prompt_forms_that_are_wrong(api: httpx.Client) -> None:
    for prompt, param in (
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", [5]], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([10**9], "prompt"),
        ([[5], [10**9]], "prompt[1]"),
        ([5, True], "prompt[1]"),
        ({"a": 1}, "prompt"),
        (["a"] * 2049, "prompt"),
    ):
        error_of(post(api, prompt=prompt), 400, param)
    error_of(post(api, prompt=None), 400, "prompt", "missing_required_parameter")


def test_a13_special_tokens(api: httpx.Client, t_lm: Path) -> None:
    reference = AutoTokenizer.from_pretrained(t_lm)
    for prompt in ("Paris is", "<|begin|>Paris is", ""):
        for special in (True, False):
            expected = reference(prompt, add_special_tokens=special)["input_ids"]
            response = post(api, prompt=prompt, add_special_tokens=special, max_tokens=1, return_token_ids=True)
            if expected:
                assert ok(response)["choices"][0]["prompt_token_ids"] == expected
            else:
                error_of(response, 400, "prompt")


def test_truncation(api: httpx.Client) -> None:
    ids = list(range(10, 40))
    for extra, expected in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 100}, ids),
    ):
        got = ok(post(api, prompt=ids, max_tokens=1, return_token_ids=True, **extra))
        assert got["choices"][0]["prompt_token_ids"] == expected
    long = [11] * 600
    got = ok(post(api, prompt=long, max_tokens=12, truncate_prompt_tokens=-1))
    assert got["usage"]["prompt_tokens"] == 500
    assert got["usage"]["completion_tokens"] <= 12
    for wrong in (0, -2, 513):
        error_of(post(api, prompt=ids, truncate_prompt_tokens=wrong), 400, "truncate_prompt_tokens")


# --- A10: limits on the output --------------------------------------------------------------------------------------


def test_a10_completions_default_to_16_tokens(api: httpx.Client) -> None:
    assert ok(post(api, prompt="a", ignore_eos=True))["usage"]["completion_tokens"] == 16
    assert ok(post(api, prompt="a", ignore_eos=True, max_completion_tokens=50))["usage"]["completion_tokens"] == 50
    got = ok(post(api, prompt="a", ignore_eos=True, max_tokens=0))
    assert (got["choices"][0]["text"], got["usage"]["completion_tokens"]) == ("", 0)
    assert got["choices"][0]["finish_reason"] == "length"
    error_of(post(api, prompt="a", max_tokens=1, max_completion_tokens=2), 400, "max_completion_tokens")


def test_a10_the_default_is_cut_to_what_fits_but_not_what_was_asked_for(api: httpx.Client) -> None:
    prompt = [11] * 505
    assert ok(post(api, prompt=prompt, ignore_eos=True))["usage"]["completion_tokens"] == 7
    error = error_of(post(api, prompt=prompt, max_tokens=8), 400, code="context_length_exceeded")
    assert "505" in error["message"]
    assert "512" in error["message"]
    error_of(post(api, prompt=[11] * 512), 400, code="context_length_exceeded")


# --- sampling: S04, S05, S06, S08 -----------------------------------------------------------------------------------


def test_s04_greedy_has_many_names(api: httpx.Client) -> None:
    greedy = text(api, prompt="The capital", max_tokens=12)
    for same in ({"top_k": 1}, {"top_p": 0}, {"temperature": 1e-9}, {"min_p": 1}, {"temperature": 0, "seed": 3}):
        assert ok(post(api, prompt="The capital", max_tokens=12, **same))["choices"][0]["text"] == greedy, same


def test_s04_filters_that_are_off(api: httpx.Client) -> None:
    body = {"prompt": "The capital", "max_tokens": 12, "seed": 5, "temperature": 1.3}
    plain = ok(post(api, **body))["choices"][0]["text"]
    for same in ({"top_k": -1}, {"top_k": 0}, {"top_k": 100000}, {"top_p": 1.0}, {"top_p": None}, {"min_p": 0}):
        assert ok(post(api, **body, **same))["choices"][0]["text"] == plain, same


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 2.1, 1e308, "hot", True]),
        ("top_p", [-0.1, 1.1, "1"]),
        ("top_k", [-2, 1.5, 2**40]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, 1e-203, 1e9]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1, "0"]),
        ("seed", [2**70, 1.5, "7"]),
        ("n", [0, -1, 129, 10**6, 1.5]),
        ("max_tokens", [-1, 10**12, 2**63, "10", 2.5, True]),
        ("min_tokens", [-1, "1"]),
        ("logprobs", [-1, 21, 2 * 10**9, True]),
        ("prompt_logprobs", [-1, 21]),
        ("best_of", [0, 21]),
        ("stop_token_ids", [[-1], [10**6], ["a"], 5, list(range(129))]),
        ("allowed_token_ids", [[], [-1], [10**6]]),
        ("bad_words", [[""], "a", [3], ["a"] * 300]),
        ("priority", [2**40, "high"]),
        ("cache_salt", ["", "x" * 200, 3]),
        ("stream_interval", [0, 10**6]),
        ("echo", ["yes", 1]),
        ("truncation_side", ["middle"]),
    ],
)
def test_s04_o02_values_out_of_range(api: httpx.Client, name: str, values: list[Any]) -> None:
    for value in values:
        error = error_of(post(api, prompt="a", **{name: value}), 400)
        assert error["param"].split("[")[0] == name, (value, error)


def test_a10_whole_numbers_may_have_a_point(api: httpx.Client) -> None:
    """JSON has one kind of numbers: JavaScript and pandas write 3 as 3.0. In schemas and the like it stays as sent."""
    as_ints = {"prompt": [5, 6], "max_tokens": 3, "n": 1, "seed": 7, "top_k": 5, "logprobs": 1, "stop_token_ids": [1]}
    floats = {k: [float(i) for i in v] if isinstance(v, list) else float(v) for k, v in as_ints.items()}
    wanted = ok(post(api, **as_ints))
    answer = ok(post(api, **floats))
    assert answer["usage"] == wanted["usage"]
    assert answer["choices"][0]["text"] == wanted["choices"][0]["text"]
    for name in ("max_tokens", "n", "seed", "top_k", "logprobs"):
        error = error_of(post(api, **{**as_ints, name: as_ints[name] + 0.5}), 400)
        assert error["param"] == name
    assert error_of(post(api, prompt=[[5.0], [6.5]]), 400)["param"] == "prompt[1][0]"
    schema = {"const": 2.0}
    text = ok(post(api, prompt="a", max_tokens=20, structured_outputs={"json": schema}))["choices"][0]["text"]
    assert float(text) == 2.0


def test_s08_bans_that_leave_no_token_are_the_callers_mistake(api: httpx.Client) -> None:
    """Not 500: clients try those again. A ban that leaves one token is fine."""
    ends = {"min_tokens": 3, "stop_token_ids": [6], "max_tokens": 5}
    for bans in (ends, {"bad_words": ["a"], "allowed_token_ids": ok(tokens_of(api, "a"))["tokens"][1:]}):
        error_of(post(api, **{"prompt": "b", "allowed_token_ids": [6], **bans}), 400, "allowed_token_ids")
    answer = ok(post(api, prompt="b", allowed_token_ids=[6, 7], return_token_ids=True, ignore_eos=True, **ends))
    assert set(answer["choices"][0]["token_ids"][:3]) == {7}


def tokens_of(api: httpx.Client, text: str) -> httpx.Response:
    return api.post("/tokenize", json={"model": "lm", "prompt": text})


def test_s05_penalties_are_felt(api: httpx.Client) -> None:
    body = {"prompt": "The capital", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "temperature": 0}

    def distinct(**penalty: float) -> int:
        return len(set(ok(post(api, **body, **penalty))["choices"][0]["token_ids"]))

    plain = distinct()
    assert distinct(frequency_penalty=2.0) > plain
    assert distinct(presence_penalty=2.0) > plain
    assert distinct(repetition_penalty=5.0) > plain
    assert distinct(frequency_penalty=0, presence_penalty=0, repetition_penalty=1) == plain


def test_s06_logit_bias(api: httpx.Client) -> None:
    body = {"prompt": "The capital", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0}

    def ids(**more: Any) -> list[int]:
        return list(ok(post(api, **body, **more))["choices"][0]["token_ids"])

    plain = ids()
    assert ids(logit_bias={}) == plain
    assert ids(logit_bias={"5": 100}) == [5] * 6
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100})
    for wrong in ({"448": 1}, {"-1": 1}, {"AI": -100}, {"ai": 1}, {"5": 1000}, {"5": "x"}, {"5": True}, {"05": 1}, []):
        error_of(post(api, prompt="a", logit_bias=wrong), 400, "logit_bias")
    error_of(post(api, prompt="a", logit_bias={str(i): 1 for i in range(301)}), 400, "logit_bias")
    assert ids() == plain


def test_allowed_token_ids_and_bad_words(api: httpx.Client) -> None:
    got = ok(post(api, prompt="a", max_tokens=10, allowed_token_ids=[40, 41], return_token_ids=True, ignore_eos=True))
    assert set(got["choices"][0]["token_ids"]) <= {40, 41}
    body = {"prompt": "The capital of France", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    plain = text(api, **{k: v for k, v in body.items() if k != "temperature"})
    word = next(w for w in plain.split() if w.isascii() and len(w) > 1)
    assert word not in ok(post(api, **body, bad_words=[word]))["choices"][0]["text"].split()


def test_s08_min_tokens_and_stops(echo: Live, api: httpx.Client) -> None:
    said = say(echo, "aaaa bbbb", stop=["b"], min_tokens=7)  # a stop within the first 7 tokens does not count
    assert (said["usage"]["completion_tokens"], said["text"]) == (8, "aaaa bbb")
    first = ok(post(api, prompt="The", temperature=0, max_tokens=8, return_token_ids=True))["choices"][0]["token_ids"]
    stopped = ok(post(api, prompt="The", temperature=0, max_tokens=8, stop_token_ids=[first[2]], return_token_ids=True))
    at = first.index(first[2])
    choice = stopped["choices"][0]
    assert choice["token_ids"] == first[: at + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first[2])
    kept = ok(
        post(api, prompt="The", temperature=0, max_tokens=8, stop_token_ids=[first[2]], include_stop_str_in_output=True)
    )["choices"][0]["text"]
    assert len(kept) > len(choice["text"])
    late = ok(post(api, prompt="The", temperature=0, stop_token_ids=[first[2]], min_tokens=6, return_token_ids=True))
    assert len(late["choices"][0]["token_ids"]) >= 6
    assert first[2] not in late["choices"][0]["token_ids"][:5]
    error_of(post(api, prompt="a", min_tokens=5, max_tokens=4), 400, "min_tokens")


def test_seed_repeats_and_n_differs(api: httpx.Client) -> None:
    body = {"prompt": "The", "max_tokens": 12, "temperature": 1.5, "seed": 11, "n": 3}
    first, second = (ok(post(api, **body)) for _ in range(2))
    texts = [c["text"] for c in first["choices"]]
    assert texts == [c["text"] for c in second["choices"]]
    assert len(set(texts)) == 3


# --- the rest -------------------------------------------------------------------------------------------------------


def test_m04_a_second_time_uses_the_cache_and_says_the_same(api: httpx.Client) -> None:
    prompt = [20 + i % 300 for i in range(100)]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "cache_salt": "m04"}
    first, second = (ok(post(api, **body)) for _ in range(2))
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
    other = ok(post(api, **{**body, "cache_salt": "other"}))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stream_interval_gathers_tokens(echo: Live) -> None:
    each = say(echo, "The quick brown fox jumps over the lazy dog")
    fours = say(echo, "The quick brown fox jumps over the lazy dog", stream_interval=4)
    assert each["text"] == fours["text"]
    assert len(fours["events"]) < len(each["events"]) / 2


def test_errors_in_a_stream_are_an_event_and_its_end(echo: Live) -> None:
    asked = {"model": "say", "prompt": "abcdef", "cache_salt": "error=non_finite_output"}
    response = echo.post("/v1/completions", {**asked, "stream": True})
    assert response.status_code == 200
    *before, last = response.text.split("\n\n")[:-1]
    assert len(before) == 1
    assert '"code":"non_finite_output"' in last
    assert "[DONE]" not in response.text
    error_of(echo.post("/v1/completions", asked), 500, code="non_finite_output")


def test_fields_that_are_not_built_are_refused_by_name(api: httpx.Client) -> None:
    for name, value in (
        ("suffix", "end"),
        ("prompt_embeds", "AAAA"),
        ("logprob_token_ids", [1]),
        ("tools", [{}]),
    ):
        error_of(post(api, prompt="a", **{name: value}), 400, name)
    for name, value in (
        ("suffix", ""),
        ("use_beam_search", False),
        ("best_of", 1),
        ("response_format", {"type": "text"}),
    ):
        ok(post(api, prompt="a", max_tokens=1, **{name: value}))
