"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`.

Values are written without quotes, each with a line break before and behind it; the tool's schema says what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import Pass, Steps
from anycore.text.replies.values import as_json, properties, resolved, types

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_BREAK = "\n"
_IN_TAG = re.compile(r"[^<>\s]+")


class QwenXml(ToolFormat):
    name: ClassVar[str] = "qwen3_coder"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END)

    def fits(self, template: str) -> bool:
        return START in template and FUNCTION in template and PARAMETER in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader({tool.name: tool for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = grammars.Rules()
        bodies = []
        for tool in tools:
            items = {
                key: f"{spell(f'{PARAMETER}{key}>{_BREAK}')} {_value(schema, tool.parameters, spell, rules)}"
                for key, schema in properties(tool.parameters).items()
            }
            head = spell(f"\n{FUNCTION}{tool.name}>\n")
            other = f"{spell(PARAMETER)} {grammars.KEY} {spell(f'>{_BREAK}')} {_value({}, {}, spell, rules)}"
            inner = rules.members(tool.parameters, items, "", other)
            bodies.append(f"{head} {inner} {spell(f'{FUNCTION_END}{_BREAK}{END}')}")
        return grammars.calls(bodies, spell(f"\n{START}") if parallel else None, rules=rules)


def _value(schema: Any, root: dict[str, Any], spell: Spell, rules: grammars.Rules) -> str:
    """A value and the end of its parameter. Strings are rules of their own, which end at that end."""
    end = f"\n{PARAMETER_END}\n"
    schema = resolved(schema, root)
    listed = grammars.constants(schema)
    if listed is not None and all(isinstance(value, str) for value in listed):
        return f"({' | '.join(spell(value + end) for value in listed)})"
    wanted = types(schema, root)
    if wanted and "string" not in wanted:
        return f"{grammars.inline(schema, root)} {spell(end)}"
    return rules.add(grammars.any_text(schema), f"suffix={json.dumps(end)}")


class _Reader(Pass):
    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START, FUNCTION)):
            yield from self.attempt(mark, self._block(mark))

    def _block(self, mark: str) -> Steps[bool]:
        if mark == START:
            yield from self.space()
        while mark == FUNCTION or (yield from self.ending(FUNCTION)):
            mark = ""
            name = yield from self.run(_IN_TAG)
            if not name or not (yield from self.literal(">")):
                return not (yield from self.peek())
            self.begin(name)
            yield from self._arguments(self.tools.get(name))
            yield from self.space()
        yield from self.ending(END)
        return self.held is None or not (yield from self.peek())

    def _arguments(self, tool: Tool | None) -> Steps[None]:
        """Read the parameters of a call, up to its end."""
        root = {} if tool is None else tool.parameters
        known = properties(root)
        mark = key = ""
        while mark not in (FUNCTION_END, END):
            if not key:
                _, mark = yield from self.upto(PARAMETER, FUNCTION_END, END)
                key = (yield from self.run(_IN_TAG)) if mark == PARAMETER else ""
                if key and not (yield from self.literal(">")):
                    key = ""
            if key:
                text, mark, following = yield from self._text(known)
                if not mark:
                    return
                self.argument(key, as_json(text, known.get(key), root))
                key = following
            elif not mark:
                return
        self.close()

    def _text(self, known: Collection[str]) -> Steps[tuple[str, str, str]]:
        """Take the text of a value and the mark behind it; return both and, if that began a parameter, its key.

        A mark that nothing of the format follows is a part of the text. Models at times leave the end of a parameter
        out: a known one that begins on a line of its own ends it as well.
        """
        pieces: list[str] = []
        line = f"\n{PARAMETER}"
        while True:
            text, mark = yield from self.upto(PARAMETER_END, FUNCTION_END, line)
            pieces.append(text)
            key = (yield from self.run(_IN_TAG)) if mark == line else ""
            closed = (yield from self.literal(">")) if key else ""
            after = (PARAMETER, FUNCTION_END, END) if mark == PARAMETER_END else (END,)
            found = closed and key in known if mark == line else not mark or (yield from self.follows(*after))
            if found:
                value = "".join(pieces).removeprefix("\n")
                return value if mark == line else value.removesuffix("\n"), mark, key
            pieces.append(mark + key + closed)
