"""DeepSeek V3.2: calls as elements whose arguments say whether they are strings: `<｜DSML｜invoke name="NAME">…`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import Pass, Steps
from anycore.text.replies.values import as_json, properties, resolved, types

START, END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
INVOKE, INVOKE_END = "<｜DSML｜invoke", "</｜DSML｜invoke>"
PARAMETER, PARAMETER_END = "<｜DSML｜parameter", "</｜DSML｜parameter>"
_BREAK = "\n"
_IS_STRING, _IS_JSON = '"true">', '"false">'
_HEAD = re.compile(r'(\s+(n(a(m(e(=("[^"]*"?)?)?)?)?)?)?)?')  # as far as it came
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class DeepSeekV32(ToolFormat):
    name: ClassVar[str] = "deepseek_v32"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END)

    def fits(self, template: str) -> bool:
        return "｜DSML｜" in template and "invoke" in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader({tool.name: tool for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = grammars.Rules()
        bodies = []
        for tool in tools:
            items = {
                key: f"{spell(f'{PARAMETER} name={json.dumps(key)} string=')} "
                f"{_value(schema, tool.parameters, spell, rules)}"
                for key, schema in properties(tool.parameters).items()
            }
            head, behind = spell(f'{PARAMETER} name="'), spell('" string=')
            other = f"{head} {grammars.KEY} {behind} {_value({}, {}, spell, rules)}"
            inner = rules.members(tool.parameters, items, "", other)
            bodies.append(f"{spell(f'{INVOKE} name={json.dumps(tool.name)}>{_BREAK}')} {inner} {spell(INVOKE_END)}")
        after = f"{spell(_BREAK)} {spell(END)}"  # apart, as a break may also stand before the next call
        return grammars.calls(bodies, spell(_BREAK) if parallel else None, spell(_BREAK), after, rules)


def _value(schema: Any, root: dict[str, Any], spell: Spell, rules: grammars.Rules) -> str:
    """What stands behind `string=`, up to the end of the element: text for strings, and JSON for anything else."""
    end = f"{PARAMETER_END}{_BREAK}"
    schema = resolved(schema, root)
    listed = grammars.constants(schema)
    if listed is not None and all(isinstance(value, str) for value in listed):
        return f"({' | '.join(spell(f'{_IS_STRING}{value}{end}') for value in listed)})"
    wanted = types(schema, root)
    last, body = spell(end), grammars.any_text(schema)
    text = f"{rules.add(body)} {last}" if last.startswith("<[") else rules.add(body, f"suffix={json.dumps(end)}")
    text = f"{spell(_IS_STRING)} {text}"
    if wanted == {"string"}:
        return text
    value = f"{spell(_IS_JSON)} {grammars.inline(schema, root)} {last}"
    return f"({text} | {value})" if not wanted else value


class _Reader(Pass):
    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools
        super().__init__()

    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START, INVOKE)):
            yield from self.attempt(mark, self._block(mark))

    def _block(self, mark: str) -> Steps[bool]:
        if mark == START:
            yield from self.space()
        while mark == INVOKE or (yield from self.ending(INVOKE)):
            mark = ""
            head, closed = yield from self.upto(">")
            name = _attributes(head).get("name", "")
            if not closed or not name:
                return not closed and _HEAD.fullmatch(head) is not None
            self.begin(name)
            yield from self._arguments(self.tools.get(name))
            yield from self.space()
        yield from self.ending(END)
        return self.held is None or not (yield from self.peek())

    def _arguments(self, tool: Tool | None) -> Steps[None]:
        """Read the elements of a call, up to its end."""
        root = {} if tool is None else tool.parameters
        known = properties(root)
        mark = PARAMETER
        while mark == PARAMETER:
            _, mark = yield from self.upto(PARAMETER, INVOKE_END, END)
            if mark == PARAMETER:
                head, _ = yield from self.upto(">")
                text, mark = yield from self._text()
                if not mark:
                    return
                told, key = _attributes(head), _attributes(head).get("name", "")
                mark = PARAMETER
                if told.get("string") == "true":
                    self.argument(key, json.dumps(text, ensure_ascii=False))
                else:
                    self.argument(key, as_json(text, {} if "string" in told else known.get(key), root))
        if mark:
            self.close()

    def _text(self) -> Steps[tuple[str, str]]:
        """Take the text of an element and its end. An end that nothing of the format follows is a part of the text."""
        pieces: list[str] = []
        while True:
            text, mark = yield from self.upto(PARAMETER_END)
            pieces.append(text)
            if not mark or (yield from self.follows(PARAMETER, INVOKE_END, END)):
                return "".join(pieces), mark
            pieces.append(mark)


def _attributes(head: str) -> dict[str, str]:
    return dict(_ATTRIBUTE.findall(head))
