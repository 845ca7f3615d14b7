"""Grammars of tool calls: whatever they allow, the reader makes calls of it that fit the tools."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from walks import Vocabulary, walk

from anycore.text.replies.formats import TOOL_FORMATS
from anycore.text.replies.parts import Called, Said, Spell, Tool, ToolFormat

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
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"const": "x y"}},
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"enum": ["l", 3, None]},
                "nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["label"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    Tool("search.web", SEARCH),
    Tool("now", {"type": "object", "properties": {}}),
    Tool("set-flags", OPTIONAL),
    Tool("plant", TREE),
]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    marks = sorted({mark for form in TOOL_FORMATS for mark in form.marks})
    return Vocabulary(tmp_path_factory.mktemp("words"), marks if request.param else [])


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


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a09_what_a_grammar_allows_is_a_call_that_fits(words: Vocabulary, form: ToolFormat) -> None:
    for tool in TOOLS:
        [(name, arguments)] = called(form, walk(words, grammar_of(form, [tool], words.spell, parallel=False)) or "")
        assert name == tool.name
        jsonschema.validate(arguments, tool.parameters)
        assert name != "now" or arguments == {}


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a09_several_calls_where_they_are_wanted(words: Vocabulary, form: ToolFormat) -> None:
    grammar = grammar_of(form, TOOLS, words.spell, parallel=True)
    for seed in range(8):
        calls = called(form, walk(words, grammar, seed) or "")
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        if len(calls) > 1:
            return
    pytest.fail("never more than one")


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_tools_without_a_schema_take_any_object(words: Vocabulary, form: ToolFormat) -> None:
    grammar = grammar_of(form, [Tool("any", {})], words.spell, False)
    matcher = LLMatcher(words.tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
