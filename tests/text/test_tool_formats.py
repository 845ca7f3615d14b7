"""Tool calls read from the text of models, whatever the pieces it comes in; and the chat templates that ask for them.

`tests/data/replies/NAME.jsonl` has replies in the form of one format, and the parts that they are made of:
["said", text] and ["call", name, arguments].
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from anycore.text.replies.formats import BUILT_IN
from anycore.text.replies.parts import Called, Part, Said, Tool, ToolFormat

DATA = Path(__file__).parent.parent / "data" / "replies"
FORMATS = {form.name: form for form in BUILT_IN}
TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    Tool("run_code", {"type": "object", "properties": {"code": {"type": "string"}}}),
    Tool("now", {"type": "object", "properties": {}}),
    Tool(
        "search",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "since": {"anyOf": [{"$ref": "#/$defs/date"}, {"type": "null"}]},
            },
            "$defs": {"date": {"type": "string"}},
        },
    ),
    Tool("book", {"type": "object", "properties": {"flight": {"type": "object"}, "seats": {"type": "integer"}}}),
]


def cases() -> Iterable[Any]:
    for name in FORMATS:
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            yield pytest.param(FORMATS[name], case["text"], case["parts"], id=f"{name}: {case['case']}")


def read(form: ToolFormat, pieces: Iterable[str]) -> list[list[str]]:
    """The parts of a reply that comes in pieces, each part whole."""
    reader = form.reader(TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return whole([*parts, *reader.end()])


def whole(parts: Iterable[Part]) -> list[list[str]]:
    joined: list[list[str]] = []
    calls = 0
    for part in parts:
        if isinstance(part, Called):
            if part.name is None:
                assert part.index == calls - 1, "a piece of a call that is over, or was never named"
                assert joined[-1][0] == "call"
                joined[-1][2] += part.arguments
            else:
                assert part.index == calls
                calls += 1
                joined.append(["call", part.name, part.arguments])
        else:
            assert isinstance(part, Said)
            if joined and joined[-1][0] == "said":
                joined[-1][1] += part.text
            else:
                joined.append(["said", part.text])
    return joined


@pytest.mark.parametrize(("form", "text", "parts"), cases())
def test_a09_replies_mean_the_same_whatever_their_pieces(form: ToolFormat, text: str, parts: list[list[str]]) -> None:
    assert read(form, [text]) == parts
    for at in range(1, len(text)):
        assert read(form, [text[:at], text[at:]]) == parts, (text[:at], text[at:])
    for size in (1, 3, 7):
        assert read(form, (text[at : at + size] for at in range(0, len(text), size))) == parts, size
    dice = random.Random(text)
    for _ in range(5):
        cuts = [0, *sorted(dice.sample(range(1, len(text)), min(len(text) - 1, dice.randint(1, 12)))), len(text)]
        pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        assert read(form, pieces) == parts, pieces
