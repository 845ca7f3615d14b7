"""GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…</tool_call>`, up to 4.6 with line breaks.

Strings are written without quotes; the tool's schema says what is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import Pass, Steps
from anycore.text.replies.values import as_json, properties, resolved, types

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_BREAK = '"\\n"?'
_NAME = re.compile(r"[^<>\s]+")


class Glm(ToolFormat):
    name: ClassVar[str] = "glm45"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END, KEY, KEY_END, VALUE, VALUE_END)

    def fits(self, template: str) -> bool:
        return START in template and KEY in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader({tool.name: tool for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = grammars.Rules()
        head, middle = spell(KEY), f"{spell(KEY_END)} {_BREAK} {spell(VALUE)}"
        bodies = []
        for tool in tools:
            items = {
                key: f"{spell(f'{KEY}{key}')} {middle} {_value(schema, tool.parameters, spell, rules)}"
                for key, schema in properties(tool.parameters).items()
            }
            other = f"{head} {grammars.KEY} {middle} {_value({}, {}, spell, rules)}"
            inner = rules.members(tool.parameters, items, "", other)
            bodies.append(f"{spell(tool.name)} {_BREAK} {inner} {spell(END)}")
        return grammars.calls(bodies, f"{_BREAK} {spell(START)}" if parallel else None, rules=rules)


def _value(schema: Any, root: dict[str, Any], spell: Spell, rules: grammars.Rules) -> str:
    """A value and its end, which is a token that text cannot hold, or what ends the rule of a string."""
    schema, end = resolved(schema, root), spell(VALUE_END)
    listed = grammars.constants(schema)
    if listed is not None and all(isinstance(value, str) for value in listed):
        return f"({' | '.join(map(spell, listed))}) {end} {_BREAK}"
    wanted = types(schema, root)
    if wanted and "string" not in wanted:
        return f"{grammars.inline(schema, root)} {end} {_BREAK}"
    text = grammars.any_text(schema)
    if end.startswith("<["):
        return f"{rules.add(text)} {end} {_BREAK}"
    return f"{rules.add(text, f'suffix={json.dumps(VALUE_END)}')} {_BREAK}"


class _Reader(Pass):
    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START)):
            yield from self.attempt(mark, self._block())

    def _block(self) -> Steps[bool]:
        yield from self.space()
        name = yield from self.run(_NAME)
        yield from self.space()
        if not name or not (yield from self.follows(KEY, END)):
            return not (yield from self.peek())
        mark = yield from self.literal(KEY, END)
        if mark:  # otherwise it is cut off, and the name perhaps, too
            self.begin(name)
            yield from self._arguments(self.tools.get(name), mark)
        return True

    def _arguments(self, tool: Tool | None, mark: str) -> Steps[None]:
        """Read keys and values behind the first mark, up to the end of the call."""
        root = {} if tool is None else tool.parameters
        known = properties(root)
        while mark == KEY:
            key, mark = yield from self.upto(KEY_END, END)
            if mark == KEY_END:
                _, mark = yield from self.upto(VALUE, END)
            if mark == VALUE:
                text, mark = yield from self._text()
                if mark:
                    self.argument(key.strip(), as_json(text, known.get(key.strip()), root))
                    _, mark = yield from self.upto(KEY, END)
        if mark:
            self.close()

    def _text(self) -> Steps[tuple[str, str]]:
        """Take the text of a value and its end. An end that nothing of the format follows is a part of the text."""
        pieces: list[str] = []
        while True:
            text, mark = yield from self.upto(VALUE_END)
            pieces.append(text)
            if not mark or (yield from self.follows(KEY, END)):
                return "".join(pieces), mark
            pieces.append(mark)
