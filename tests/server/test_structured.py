"""Outputs that keep to what a request says of them, over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import pytest
from server.answers import error_of, events_of, ok, streamed_text

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "Hi"}]


def chat(api: httpx.Client, **more: Any) -> httpx.Response:
    body = {"model": "lm", "messages": HI, "max_tokens": 120, "temperature": 0, **more}
    return api.post("/v1/chat/completions", json=body)


def forced(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}}


def test_a06_a_grammar_that_meets_bans_is_the_callers_mistake(api: httpx.Client) -> None:
    """Not 500: nothing was wrong with the model's numbers."""
    body = {"model": "lm", "prompt": "a", "max_tokens": 9, "guided_choice": ["yes", "no"], "allowed_token_ids": [6]}
    error = error_of(api.post("/v1/completions", json=body), 400, code="invalid_grammar")
    assert "allowed_token_ids" in error["message"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_schema_is_kept_to_whole_and_streamed(api: httpx.Client, n: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    options = {"response_format": form, "n": n, "temperature": 1, "seed": 3}
    got = ok(chat(api, **options))
    texts = [choice["message"]["content"] for choice in got["choices"]]
    for choice, text in zip(got["choices"], texts, strict=True):
        jsonschema.validate(json.loads(text), PERSON)
        assert choice["finish_reason"] == "stop"
    events = events_of(chat(api, **options, stream=True))
    assert [streamed_text(events, i) for i in range(n)] == texts


FIELDS = [
    ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    ({"structured_outputs": {"json": PERSON}}, r"\{\s*\"name\".*\}"),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, r"\{\s*\"name\".*\}"),
    ({"structured_outputs": {"regex": "[ab]{4}-[0-9]{2}"}}, "[ab]{4}-[0-9]{2}"),
    ({"structured_outputs": {"grammar": 'root ::= "x" ("y" | "z")'}}, "x[yz]"),
    ({"structured_outputs": {"grammar": 'start: "x" ("y" | "z")'}}, "x[yz]"),
    ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
    ({"guided_choice": ["red", "blue"]}, "red|blue"),
    ({"guided_regex": "a{3}"}, "aaa"),
    ({"guided_json": {"enum": [1, 2]}}, "[12]"),
    ({"guided_grammar": 'start: "q"'}, "q"),
    ({"json_schema": {"const": "c"}}, '"c"'),
    ({"grammar": 'root ::= "l"'}, "l"),
    ({"ebnf": 'root ::= "s"'}, "s"),
    ({"regex": "(no)+"}, "(no)+"),
]


@pytest.mark.parametrize(("field", "expected"), FIELDS, ids=lambda value: json.dumps(value)[:50])
def test_every_name_for_it_works_in_chats_and_completions(api: httpx.Client, field: Any, expected: str) -> None:
    more = {"temperature": 1.0, "seed": 5, "max_tokens": 200}
    text = ok(chat(api, **field, **more))["choices"][0]["message"]["content"]
    assert re.match(expected, text, re.DOTALL)
    got = ok(api.post("/v1/completions", json={"model": "lm", "prompt": "Hi", **field, **more}))
    assert re.match(expected, got["choices"][0]["text"], re.DOTALL)


@pytest.mark.parametrize("text", ["🫠щ龜e\u0301👩‍👩‍👧", "a"])
def test_a01_forced_characters_of_several_tokens(api: httpx.Client, text: str) -> None:
    whole = ok(chat(api, **forced(text)))["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
    streamed = [event["choices"][0] for event in events_of(chat(api, **forced(text), stream=True)) if event["choices"]]
    pieces = [choice["delta"].get("content", "") for choice in streamed]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a06_logprobs_of_masked_tokens_are_finite(api: httpx.Client) -> None:
    got = ok(chat(api, **forced("a"), logprobs=True, top_logprobs=20))  # ok: strict JSON, no Infinity
    entries = got["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "a"
    for entry in entries:
        assert entry["logprob"] > -9999.1
        assert all(-9999.1 < top["logprob"] <= 0 for top in entry["top_logprobs"])


WRONG = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strung"}}}}, "response_format"),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start ="}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {}, "guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize(("field", "param"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_kept_to_is_refused_by_name(api: httpx.Client, field: Any, param: str) -> None:
    error_of(chat(api, **field), 400, param)
    error_of(api.post("/v1/completions", json={"model": "lm", "prompt": "Hi", **field}), 400, param)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def branching(levels: int) -> dict[str, Any]:
    branch = {"anyOf": [{"$ref": f"#/$defs/d{levels - 1}"}] * 2}
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, levels)}
    return {**branch, "$defs": {**defs, "d0": {"type": "string"}}}


HOSTILE = [
    {"guided_regex": "(((a{1,200}){1,200}){1,200})+b"},
    {"guided_regex": "(a|aa)*" * 200 + "b"},
    {"guided_json": nested(300)},
    {"guided_json": branching(40)},
    {"guided_json": {"type": "array", "minItems": 10**9}},
    {"guided_json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 10**7}},
    {"guided_json": {"$ref": "#"}},
    {"guided_grammar": "start: start start | start"},
]


@pytest.mark.parametrize("field", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_ones_end_and_others_go_on(api: httpx.Client, field: Any) -> None:
    """They are refused, or answered after a few tokens; a request beside them is answered as ever."""
    response = chat(api, **field, max_tokens=4)
    assert response.status_code in (200, 400), response.text
    assert ok(chat(api, max_tokens=2))["usage"]["completion_tokens"] == 2
