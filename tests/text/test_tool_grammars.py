"""Grammars of tool calls: whatever they allow, the reader makes calls of it that fit the tools."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tiny import EOS, save_bpe

from anycore.text.grammar import speller, vocabulary
from anycore.text.replies.formats import BUILT_IN
from anycore.text.replies.parts import Called, Said, Spell, Tool, ToolFormat
from anycore.text.tokenizer import Tokenizer, from_folder

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 12},
        "limit": {"type": "integer", "minimum": 0, "maximum": 50},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["km", "mi"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
        "where": {"$ref": "#/$defs/place"},
        "since": {"anyOf": [{"type": "integer", "minimum": 1900, "maximum": 2100}, {"type": "null"}]},
    },
    "required": ["query", "limit"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "near": {"type": "boolean"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "x y"}}}
TOOLS = [
    Tool("search.web", SEARCH),
    Tool("now", {"type": "object", "properties": {}}),
    Tool("set-flags", OPTIONAL),
]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


class Vocabulary:
    """A small tokenizer, with the marks of all formats as tokens or without them."""

    def __init__(self, folder: Path, marks: bool) -> None:
        extra = sorted({mark for form in BUILT_IN for mark in form.marks}) if marks else []
        ids = save_bpe(folder, 448, prefix=[], extra=extra)
        self.tokenizer: Tokenizer = from_folder(folder)
        self.tokens: LLTokenizer = vocabulary(self.tokenizer, ids["size"], [ids[EOS]])
        self.end = ids[EOS]
        self.size = ids["size"]
        self.spell: Spell = speller(self.tokenizer)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("words"), request.param)


def walk(words: Vocabulary, grammar: str, seed: int = 0, limit: int = 1500) -> str:
    """A text that a grammar allows, token by token at random. It goes on where it could end for the first time."""
    matcher = LLMatcher(words.tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = allocate_token_bitmask(1, words.size)
    dice = random.Random(seed)
    tokens: list[int] = []
    ends = 0
    while len(tokens) < limit:
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: words.size])
        assert len(allowed), (words.tokenizer.decode(tokens, False), matcher.get_error())
        token = words.end
        if words.end in allowed:
            ends += 1
            if len(allowed) == 1 or ends > 1:
                return words.tokenizer.decode(tokens, skip_special_tokens=False)
        while token == words.end:
            token = int(dice.choice(allowed))
        assert matcher.consume_token(token)
        tokens.append(token)
    pytest.fail(f"no end: {words.tokenizer.decode(tokens, False)[-300:]!r}")


def called(form: ToolFormat, text: str) -> list[tuple[str, Any]]:
    reader = form.reader(TOOLS)
    calls: list[list[str]] = []
    for part in [part for character in text for part in reader.feed(character)] + reader.end():
        assert not isinstance(part, Said), text
        assert isinstance(part, Called)
        if part.name is not None:
            calls.append([part.name, ""])
        calls[-1][1] += part.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


def grammar_of(form: ToolFormat, tools: list[Tool], spell: Spell, parallel: bool) -> str:
    opening = spell(form.opening) if form.opening else ""
    return f"start: {opening} calls\n{form.grammar(tools, spell, parallel)}"


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
def test_a09_what_a_grammar_allows_is_a_call_that_fits(words: Vocabulary, form: ToolFormat) -> None:
    for tool in TOOLS:
        [(name, arguments)] = called(form, walk(words, grammar_of(form, [tool], words.spell, parallel=False)))
        assert name == tool.name
        jsonschema.validate(arguments, tool.parameters)
        assert name != "now" or arguments == {}


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
def test_a09_several_calls_where_they_are_wanted(words: Vocabulary, form: ToolFormat) -> None:
    grammar = grammar_of(form, TOOLS, words.spell, parallel=True)
    for seed in range(8):
        calls = called(form, walk(words, grammar, seed))
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        if len(calls) > 1:
            return
    pytest.fail("never more than one")


@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.name)
def test_tools_without_a_schema_take_any_object(words: Vocabulary, form: ToolFormat) -> None:
    grammar = grammar_of(form, [Tool("any", {})], words.spell, False)
    matcher = LLMatcher(words.tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
