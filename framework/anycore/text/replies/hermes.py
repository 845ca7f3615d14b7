"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.json_calls import JsonPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import Steps

START, END = "<tool_call>", "</tool_call>"
_BETWEEN = ', "arguments": '
_SURPLUS = re.compile(r"[\s}]+")


class Hermes(ToolFormat):
    name: ClassVar[str] = "hermes"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END)

    def fits(self, template: str) -> bool:
        return START in template and "<function=" not in template and "<arg_key>" not in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader()

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        before, after = '\n{"name": ', spell(f"}}\n{END}")
        bodies = [
            f"{grammars.named(before, tool, _BETWEEN, spell)} {grammars.arguments(tool)} {after}" for tool in tools
        ]
        return grammars.calls(bodies, spell(f"\n{START}") if parallel else None)


class _Reader(JsonPass):
    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START)):
            yield from self.attempt(mark, self._block())

    def _block(self) -> Steps[bool]:
        yield from self.space()
        if (first := (yield from self.peek())) != "{":
            return not first
        while (yield from self.call()):
            yield from self.run(_SURPLUS)
            if (yield from self.ending(END)) or (yield from self.peek()) != "{":
                return True
        if self.held is None:
            yield from self.leave(END)
        return not (yield from self.peek())
