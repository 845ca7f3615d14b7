"""Completions that are the best of several: beam searches, best_of; ids that are named; fill in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny
import torch
from server.answers import error_of, events_of, ok
from server.conftest import served
from server.harness import Live, serve_here
from server.test_api_disconnect import engine, send, until

PROMPT = [11, 50, 60, 70, 80, 90, 100, 17]
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has Qwen's tokens for filling in."""
    folder = tiny.tiny_lm(tmp_path_factory.mktemp("coder"), layers=2)
    tiny.save_bpe(folder, 440, prefix=[tiny.BOS], extra=FIM)
    return folder


@pytest.fixture(scope="module")
def live(t_lm: Path, coder: Path) -> Iterator[Live]:
    models = served(t_lm, "lm"), served(coder, "coder", scheduling_policy="priority")
    with serve_here(*models) as running:
        yield running


@pytest.fixture(scope="module")
def lm(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


def post(lm: httpx.Client, **body: Any) -> httpx.Response:
    return lm.post("/v1/completions", json={"model": "lm", "prompt": PROMPT, **body})


def search(lm: httpx.Client, **body: Any) -> httpx.Response:
    asked = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 10, "return_token_ids": True}
    return post(lm, **{**asked, **body})


@lru_cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def theirs(folder: Path, ends: list[int], **options: Any) -> list[list[int]]:
    ids = torch.tensor([PROMPT])
    found = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=4,
        num_return_sequences=2,
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        **options,
    )
    rows = found[:, len(PROMPT) :].tolist()
    return [row[: next((i + 1 for i, t in enumerate(row) if t in ends), len(row))] for row in rows]


# --- S11: beam search -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1, 2])
def test_s11_beams_equal_hugging_face(lm: httpx.Client, t_lm: Path, penalty: float) -> None:
    eos = reference(t_lm).config.eos_token_id
    ends = [eos, 30, 31, 32]
    reply = ok(search(lm, length_penalty=penalty, stop_token_ids=ends[1:], temperature=0))
    choices = reply["choices"]
    assert [c["token_ids"] for c in choices] == theirs(t_lm, ends, length_penalty=float(penalty))
    assert [c["index"] for c in choices] == [0, 1]
    for choice in choices:
        last = choice["token_ids"][-1]
        assert choice["finish_reason"] == ("stop" if last in ends else "length")
        assert choice["stop_reason"] == (last if last in ends[1:] else None)
    assert reply["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)


def test_s11_eos_and_stop_strings_end_beams(lm: httpx.Client, t_lm: Path) -> None:
    eos = reference(t_lm).config.eos_token_id
    first, second = ok(search(lm, logit_bias={str(eos): 9.0}, length_penalty=0))["choices"]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert first["token_ids"][-1] == eos or second["token_ids"][-1] == eos
    plain = ok(search(lm))["choices"][0]
    letter = next(c for c in plain["text"][1:] if c.isascii())
    for kept in (False, True):
        choices = ok(search(lm, stop=[letter], include_stop_str_in_output=kept, n=4))["choices"]
        stopped = [c for c in choices if c["stop_reason"] == letter]
        assert stopped
        for choice in stopped:
            assert choice["finish_reason"] == "stop"
            assert (letter in choice["text"]) == kept
        assert all(letter not in c["text"] for c in choices if c["stop_reason"] != letter)


def test_s11_beams_are_sorted_and_bring_their_logprobs(lm: httpx.Client) -> None:
    for n in (1, 4):
        choices = ok(search(lm, n=n, logprobs=2, echo=True))["choices"]
        assert len(choices) == n
        scores = []
        for choice in choices:
            own = choice["logprobs"]["token_logprobs"][len(PROMPT) :]
            assert len(own) == len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) - len(PROMPT)
            scores.append(sum(own) / len(own))
        assert scores == sorted(scores, reverse=True)
    prompts = ok(search(lm, prompt=[PROMPT, [9, *PROMPT]], n=2))["choices"]
    assert [c["index"] for c in prompts] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in prompts[:2]] == [c["token_ids"] for c in choices[:2]]


def test_s11_width_is_n_where_best_of_is_left_out(lm: httpx.Client) -> None:
    wide = ok(search(lm, n=4))["choices"]
    assert ok(search(lm, n=4, best_of=None))["choices"] == wide
    one = ok(search(lm, n=1, best_of=None, temperature=1, top_k=-1, top_p=1))["choices"][0]
    greedy = ok(post(lm, temperature=0, max_tokens=10, return_token_ids=True))["choices"][0]
    assert one["token_ids"] == greedy["token_ids"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 5}, "best_of"),
        ({"n": 21, "best_of": None}, "n"),
        ({"best_of": 21}, "best_of"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"length_penalty": "2"}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1000}, "max_tokens"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"guided_regex": "a+"}, "structured_outputs"),
        ({"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"allowed_token_ids": [9]}, "n"),
    ],
)
def test_s11_o02_what_a_search_cannot_do_is_refused(lm: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    error = error_of(search(lm, **wrong), 400)
    assert error["param"] in (param, None)
    assert param in error["message"]
    ok(lm.get("/health"))


LONG: dict[str, Any] = {"model": "lm", "prompt": PROMPT, "use_beam_search": True, "best_of": 20, "ignore_eos": True}


def test_m10_a_search_that_is_late_or_whose_client_is_gone_leaves_nothing(live: Live) -> None:
    client = engine(live)

    def idle() -> bool:
        stats = client.stats
        return client.live == stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks

    until(idle)
    late = live.post("/v1/completions", {**LONG, "max_tokens": 500}, headers={"x-request-timeout": "0.3"})
    error_of(late, 504)
    until(idle)
    connection = send(live, {**LONG, "max_tokens": 500})
    until(lambda: client.live == 1 and client.stats.running > 1)
    connection.close()
    until(idle)
    assert ok(live.post("/v1/completions", {**LONG, "max_tokens": 2}))


def test_s11_chats_have_beams_too(lm: httpx.Client) -> None:
    body = {"model": "lm", "messages": [{"role": "user", "content": "The quick brown fox"}], "return_token_ids": True}
    beams = {"use_beam_search": True, "n": 2, "best_of": 4, "max_tokens": 8, "length_penalty": 0.5}
    reply = ok(lm.post("/v1/chat/completions", json={**body, **beams, "logprobs": True, "top_logprobs": 2}))
    text = ok(post(lm, prompt=reply["prompt_token_ids"], **beams, return_token_ids=True))
    assert [c["token_ids"] for c in reply["choices"]] == [c["token_ids"] for c in text["choices"]]
    assert [c["message"]["content"] for c in reply["choices"]] == [c["text"] for c in text["choices"]]
    for choice in reply["choices"]:
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    drawn = {"n": 2, "best_of": 4, "max_tokens": 8, "seed": 3}
    reply = ok(lm.post("/v1/chat/completions", json={**body, **drawn}))
    text = ok(post(lm, prompt=reply["prompt_token_ids"], **drawn, return_token_ids=True))
    assert [c["token_ids"] for c in reply["choices"]] == [c["token_ids"] for c in text["choices"]]
    assert reply["usage"]["completion_tokens"] == text["usage"]["completion_tokens"]
    named = ok(
        lm.post("/v1/chat/completions", json={**body, "max_tokens": 1, "logprobs": True, "logprob_token_ids": [9, 7]})
    )["choices"][0]["logprobs"]["content"][0]
    assert len(named["top_logprobs"]) in (2, 3)
    assert named["top_logprobs"][0]["logprob"] == named["logprob"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"best_of": 21}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_s11_o02_what_a_chat_cannot_have_is_refused(lm: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    error_of(lm.post("/v1/chat/completions", json={"model": "lm", "messages": messages, **wrong}), 400, param)


# --- best_of --------------------------------------------------------------------------------------------------------


def test_best_of_returns_the_likeliest_and_counts_all(lm: httpx.Client) -> None:
    body = {"temperature": 1.3, "seed": 5, "max_tokens": 6, "logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    every = ok(post(lm, n=4, **body))["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 6 for c in every]
    ranked = [every[i]["token_ids"] for i in sorted(range(4), key=lambda i: -means[i])]
    reply = ok(post(lm, n=2, best_of=4, **body))
    assert [c["token_ids"] for c in reply["choices"]] == ranked[:2]
    assert [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 24
    assert "logprobs" in reply["choices"][0]
    two = ok(post(lm, best_of=4, **{**body, "logprobs": None, "prompt": [PROMPT, PROMPT]}))["choices"]
    assert [(c["index"], c["token_ids"], c["logprobs"]) for c in two] == [(0, ranked[0], None), (1, ranked[0], None)]


def test_best_of_as_many_as_n_is_plain(lm: httpx.Client) -> None:
    body = {"n": 2, "seed": 1, "max_tokens": 4}
    assert ok(post(lm, best_of=2, **body))["choices"] == ok(post(lm, **body))["choices"]
    assert events_of(post(lm, best_of=2, stream=True, **body))
    error_of(post(lm, n=1, best_of=2, stream=True), 400, "stream")
    error_of(post(lm, n=3, best_of=2), 400, "best_of")


# --- logprob_token_ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_named_ids_come_with_every_token(lm: httpx.Client, t_lm: Path, stream: bool) -> None:
    names = [9, 400, 7]
    body = {
        "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 2,
        "return_tokens_as_token_ids": True, "logprob_token_ids": names, "stream": stream,
    }  # fmt: skip
    response = post(lm, **body)
    parts = [c for e in events_of(response) for c in e["choices"]] if stream else ok(response)["choices"]
    ids = [i for part in parts for i in part["token_ids"]]
    tops = [top for part in parts for top in part["logprobs"]["top_logprobs"]]
    with torch.inference_mode():
        table = reference(t_lm)(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(tops) == len(ids) == 4
    for row, token, top in zip(table, ids, tops, strict=True):
        assert set(top) == {f"token_id:{i}" for i in (token, *names)}
        for name, value in top.items():
            assert value == pytest.approx(row[int(name.partition(":")[2])].item(), abs=1e-4)


def test_s06_o02_ids_that_cannot_be_named(lm: httpx.Client) -> None:
    for wrong in ([-1], [10**6], [2**70], ["a"], [1.5], 5, list(range(129))):
        error = error_of(post(lm, logprobs=1, logprob_token_ids=wrong), 400)
        assert error["param"].startswith("logprob_token_ids")
    for more in ({}, {"best_of": 2}):
        error_of(post(lm, logprob_token_ids=[5], **more), 400, "logprob_token_ids")
    ok(post(lm, max_tokens=1, logprob_token_ids=None))


# --- suffix ---------------------------------------------------------------------------------------------------------


def test_suffix_puts_the_parts_in_the_models_own_order(lm: httpx.Client, coder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(coder)
    expected = tokenizer("<|fim_prefix|>def add(<|fim_suffix|>): return 1<|fim_middle|>")["input_ids"]
    body = {"model": "coder", "prompt": "def add(", "suffix": "): return 1", "max_tokens": 3, "return_token_ids": True}
    choice = ok(post(lm, **body))["choices"][0]
    assert choice["prompt_token_ids"] == expected
    assert events_of(post(lm, **body, stream=True))[0]["choices"][0]["prompt_token_ids"] == expected
    without = ok(post(lm, **body, add_special_tokens=False))["choices"][0]["prompt_token_ids"]
    assert without == expected[1:]
    ids = tokenizer("def add(", add_special_tokens=False)["input_ids"]
    assert ok(post(lm, **{**body, "prompt": ids}))["choices"][0]["prompt_token_ids"] == expected
    cut = ok(post(lm, **body, truncate_prompt_tokens=len(expected) - 1))["choices"][0]["prompt_token_ids"]
    assert cut == [*expected[:2], *expected[3:]]
    pad = tokenizer.convert_tokens_to_ids("<|fim_pad|>")
    ended = ok(post(lm, **body, logit_bias={str(pad): 100}))["choices"][0]
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == ("", "stop", pad)


def test_suffix_where_the_model_cannot(lm: httpx.Client) -> None:
    error = error_of(post(lm, suffix="end"), 400, "suffix")
    assert "<|fim_prefix|>" in error["message"]
    error_of(post(lm, model="coder", prompt="a", suffix="b", echo=True), 400, "echo")
    error_of(post(lm, model="coder", prompt="a", suffix=5), 400, "suffix")
    error_of(post(lm, model="coder", prompt="a", suffix="b " * 600), 400, code="context_length_exceeded")
    ok(post(lm, suffix="", max_tokens=1))


# --- truncate_prompt_tokens, continue_final_message, priority: as in vLLM -------------------------------------------


def test_chat_prompts_are_cut_like_others(lm: httpx.Client) -> None:
    body = {"model": "lm", "messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 1}

    def ids(**more: Any) -> list[int]:
        reply = ok(lm.post("/v1/chat/completions", json={**body, "return_token_ids": True, **more}))
        return list(reply["prompt_token_ids"])

    whole = ids()
    assert ids(truncate_prompt_tokens=5) == whole[-5:]
    assert ids(truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert ids(truncate_prompt_tokens=-1) == whole
    for wrong in (0, -2, 513, "5"):
        refused = lm.post("/v1/chat/completions", json={**body, "truncate_prompt_tokens": wrong})
        error_of(refused, 400, "truncate_prompt_tokens")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_priority_is_taken(lm: httpx.Client, route: str) -> None:
    body = {"model": "coder", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    del body["prompt" if "chat" in route else "messages"]
    for priority in (-5, 0, 7):
        ok(lm.post(route, json={**body, "priority": priority}))
    for wrong in (2**40, "high", 1.5):
        error_of(lm.post(route, json={**body, "priority": wrong}), 400, "priority")
