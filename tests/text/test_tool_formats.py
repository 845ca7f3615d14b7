"""Tool calls read from the text of models, whatever the pieces it comes in; and the chat templates that ask for them.

`tests/data/replies/NAME.jsonl` has replies in the form of one format, and the parts that they are made of:
["said", text] and ["call", name, arguments].
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anycore.text.replies.formats import TOOL_FORMATS
from anycore.text.replies.parts import Called, Part, Said, Tool, ToolFormat

DATA = Path(__file__).parent.parent / "data" / "replies"
FORMATS = {form.name: form for form in TOOL_FORMATS}
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
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        assert read(form, pieces) == parts, pieces


SCRAPS = ["{", "}", "[", "]", "(", ")", ",", ":", '"', "'", "\\", "\n", " ", "=", "a", "5", "null", "now", "city",
          "call:", "function", "```json", '{"name": "now", ', '"name": "nobody"', '"arguments": {', '"parameters": ',
          "<function=", "<parameter=", "</parameter>", "</function>", ">", ";", "get_weather", "now()", "ü🫠",
          "\\u12"]  # fmt: skip


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a09_nonsense_is_read_the_same_whatever_its_pieces(form: ToolFormat) -> None:
    dice = random.Random(form.name)
    for _ in range(150):
        text = form.opening * dice.randint(0, 1) + "".join(
            dice.choice(form.marks if dice.random() < 0.3 else SCRAPS) for _ in range(dice.randint(1, 25))
        )
        parts = read(form, [text])
        assert read(form, text) == parts, text
        at = dice.randint(0, len(text))
        assert read(form, [text[:at], text[at:]]) == parts, (text[:at], text[at:])


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_brackets_without_end_do_no_harm(form: ToolFormat) -> None:
    before = {
        "hermes": '<tool_call>{"name": "now", "arguments": ',
        "qwen3_coder": "<tool_call><function=now><parameter=a>",
        "deepseek_v32": '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="false">',
        "glm45": "<tool_call>now<arg_key>a</arg_key><arg_value>",
        "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
        "pythonic": "[now(a=",
        "llama3_json": '{"name": "now", "parameters": ',
        "mistral": "[TOOL_CALLS]now",
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n",
        "deepseek_v31": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    }
    start = before.get(form.name, form.opening + "call:now{a:")
    for text in (start + "{" + "[" * 5000, start + "{" * 5000, start + "{a:" * 5000):
        parts = read(form, [text])
        assert parts[0][:2] == ["call", "now"]
        assert read(form, [text[at : at + 1000] for at in range(0, len(text), 1000)]) == parts


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_arguments_come_as_soon_as_they_are_there(form: ToolFormat) -> None:
    """JSON goes through as it is written; in other notations each argument when its value is whole."""
    text = next(text for _, text, _ in (case.values for case in cases() if case.id == f"{form.name}: numbers"))
    reader = form.reader(TOOLS)
    given = [text.index("search"), *(text.index(key) for key in ("below", "huge"))]
    sent = ""
    for at, character in enumerate(text):
        sent += "".join(part.arguments for part in reader.feed(character) if isinstance(part, Called))
        if at == given[1] + len("below"):
            assert '"limit": -12' in sent
        if at == given[2] + len("huge"):
            assert '"below": 0.0025' in sent
    assert json.loads(sent)["huge"] == 12345678901234567890


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n{{ call | tojson }}\\n</tool_call>", "hermes"),
        ("'<tool_call>\\n<function=' + name + '>\\n<parameter=' + key + '>'", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>", "glm45"),
        ('[TOOL_CALLS] [{"name": ', "mistral"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n'",
            "deepseek_v3",
        ),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("'<|tool_calls_section_begin|><|tool_call_begin|>' + id + '<|tool_call_argument_begin|>'", "kimi_k2"),
        ("'<｜DSML｜invoke name=\"' + name + '\">'", "deepseek_v32"),
        ("'<start_function_call>call:' + name + '{'", "functiongemma"),
        ("'<|tool_call>call:' + name + '{'", "gemma4"),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ('"<|python_tag|>" + name + ".call("', "llama3_json"),
        ("{{ message.content }}", None),
    ],
)
def test_templates_show_the_format(template: str, name: str | None) -> None:
    assert next((form.name for form in TOOL_FORMATS if form.fits(template)), None) == name
