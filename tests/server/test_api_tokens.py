"""/tokenize and /detokenize over HTTP, for models of every task."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from server.answers import error_of, ok
from transformers import AutoTokenizer

PATHS = ["/tokenize", "/v1/tokenize"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("model", "fixture"), [("lm", "t_lm"), ("bert", "t_bert"), ("qemb", "t_qemb"), ("ce", "t_ce")])
def test_ids_are_those_of_hugging_face(
    api: httpx.Client, path: str, model: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(fixture)
    reference = AutoTokenizer.from_pretrained(folder)
    for prompt in ("The quick brown fox", "", "щука 🫠"):
        for special in (True, False):
            got = ok(api.post(path, json={"model": model, "prompt": prompt, "add_special_tokens": special}))
            assert got["tokens"] == reference(prompt, add_special_tokens=special)["input_ids"]
            assert got["count"] == len(got["tokens"])
    assert got["max_model_len"] == ok(api.get(f"/v1/models/{model}"))["max_model_len"]


def test_token_texts(api: httpx.Client) -> None:
    got = ok(api.post("/tokenize", json={"model": "lm", "prompt": "Paris is", "return_token_strs": True}))
    assert got["token_strs"][0] == "<|begin|>"
    assert "".join(got["token_strs"][1:]) == "Paris is"


def test_there_and_back(api: httpx.Client) -> None:
    for text in ("The quick brown fox", "щука 🫠 e\u0301"):
        ids = ok(api.post("/tokenize", json={"model": "lm", "prompt": text, "add_special_tokens": False}))["tokens"]
        for path in ("/detokenize", "/v1/detokenize"):
            assert ok(api.post(path, json={"model": "lm", "tokens": ids}))["prompt"] == text
    assert ok(api.post("/detokenize", json={"model": "lm", "tokens": [1]}))["prompt"] == "<|begin|>"
    assert ok(api.post("/detokenize", json={"model": "lm", "tokens": []}))["prompt"] == ""


def test_a11_what_cannot_be_tokenised(api: httpx.Client) -> None:
    for body, param in (
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
    ):
        error_of(api.post("/tokenize", json={"model": "lm", **body}), 400, param)
    error_of(
        api.post("/tokenize", json={"model": "bert", "messages": [{"role": "user", "content": "a"}]}), 400, "messages"
    )
    for tokens, param in (
        ([-1], "tokens[0]"),
        ([10**9], "tokens"),
        (["a"], "tokens[0]"),
        (5, "tokens"),
        ([1.5], "tokens[0]"),
    ):
        error_of(api.post("/detokenize", json={"model": "lm", "tokens": tokens}), 400, param)
