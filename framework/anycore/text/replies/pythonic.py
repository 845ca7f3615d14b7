"""Llama 3.2 and 4: the whole reply is `[f(a=1, b="x"), g()]`, perhaps between `<|python_start|>` and `<|python_end|>`.

Without the mark, a list that does not begin with the call of a known tool is an answer like any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.literals import BARE, LiteralPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import NAME, Steps
from anycore.text.replies.values import as_json, properties, types

START, END = "<|python_start|>", "<|python_end|>"
_SPACE = re.compile(r"\s+")
_KEY = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/",
            "\\": "\\", "'": "'", '"': '"'}  # fmt: skip


class Pythonic(ToolFormat):
    name: ClassVar[str] = "pythonic"
    marks: ClassVar[tuple[str, ...]] = (START, END)

    def fits(self, template: str) -> bool:
        return "[func_name1(" in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader({tool.name: tool for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        rules = grammars.Rules()
        bodies = []
        for tool in tools:
            items = {
                key: f"{spell(f'{key}=')} {_value(schema, tool.parameters)}"
                for key, schema in properties(tool.parameters).items()
            }
            other = f"{grammars.KEY} {spell('=')} {grammars.inline(True)}"
            inner = rules.members(tool.parameters, items, spell(", "), other)
            bodies.append(f"{spell(f'{tool.name}(')} {inner} {spell(')')}")
        return grammars.calls(bodies, spell(", ") if parallel else None, spell("["), spell("]"), rules)


def _value(schema: Any, root: dict[str, Any]) -> str:
    """Python's words where a value is one of them, otherwise JSON, which reads nearly the same."""
    if types(schema, root) == {"boolean"} and grammars.constants(schema) is None:
        return '("True" | "False")'
    return grammars.inline(schema, root)


def unescape(text: str) -> str:
    """What stands between the quotes of a Python string. A pair of surrogates is one character, as in JSON."""
    plain = _ESCAPE.sub(_character, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(found: re.Match[str]) -> str:
    code = found[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] in "uUx" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else "\ufffd"
    return chr(int(code, 8)) if code[0] in "01234567" else found[0]


class _Reader(LiteralPass):
    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools
        super().__init__(('"""', "'''", '"', "'"), unescape)

    def read(self) -> Steps[None]:
        yield from self.attempt("", self._list(bare=True))
        while mark := (yield from self.prose(START)):
            yield from self.attempt(mark, self._list(bare=False))

    def _list(self, bare: bool) -> Steps[bool]:
        yield from self.space()
        if not (yield from self.literal("[")):
            return False
        while True:
            yield from self.space()
            name = yield from self.run(NAME)
            yield from self.space()
            known = name in self.tools or not bare or self.held is None
            if not name or not known or not (yield from self.literal("(")):
                break
            self.begin(name)
            if not (yield from self._arguments(self.tools.get(name))):
                break
            yield from self.space()
            if (yield from self.literal("]")):
                yield from self.space()
                yield from self.ending(END)
                return True
            if not (yield from self.literal(",")):
                break
        return not bare and not (yield from self.peek())

    def _arguments(self, tool: Tool | None) -> Steps[bool]:
        """Read the arguments of a call, up to its end. Those without a key are given the tool's keys in order."""
        root = {} if tool is None else tool.parameters
        keys = list(properties(root))
        while True:
            yield from self.space()
            if (yield from self.literal(")")):
                self.close()
                return True
            if (yield from self.literal(",")):
                continue
            word = yield from self.run(_KEY)
            gap = yield from self.run(_SPACE)
            value: str | None
            if word and (yield from self.literal("=")):
                key, value = word, (yield from self.value(properties(root).get(word), root))
            elif not keys:
                return False
            elif word:
                key, value = (
                    keys[0],
                    as_json((word + gap + (yield from self.run(BARE))).strip(), properties(root).get(keys[0]), root),
                )
            else:
                key, value = keys[0], (yield from self.value(properties(root).get(keys[0]), root))
            if value is None:
                return False
            keys = [other for other in keys if other != key]
            self.argument(key, value)
