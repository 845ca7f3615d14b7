"""Kimi K2: calls between marks of their own: `functions.NAME:0`, numbered through the conversation, and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.json_calls import JsonPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import NAME, Steps

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIND = "functions."
_NUMBER = re.compile(r"[:\d]+")


class Kimi(ToolFormat):
    name: ClassVar[str] = "kimi_k2"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END, CALL, ARGUMENTS, CALL_END)

    def fits(self, template: str) -> bool:
        return START in template and ARGUMENTS in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader()

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        bodies = [
            f"{spell(f'{CALL}{_KIND}{tool.name}:')} /[0-9]{{1,4}}/ {spell(ARGUMENTS)} {grammars.arguments(tool)}"
            f" {spell(CALL_END)}"
            for tool in tools
        ]
        return grammars.calls(bodies, "" if parallel else None, after=spell(END))


class _Reader(JsonPass):
    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START, CALL)):
            yield from self.attempt(mark, self._block(mark))

    def _block(self, mark: str) -> Steps[bool]:
        if mark == START:
            yield from self.space()
        while mark == CALL or (yield from self.ending(CALL)):
            mark = ""
            if not (yield from self._call()):
                return not (yield from self.peek())
            if (yield from self.leave(CALL_END, END)) == END:
                return True
            yield from self.space()
        yield from self.ending(END)
        return self.held is None or not (yield from self.peek())

    def _call(self) -> Steps[bool]:
        yield from self.space()
        name = yield from self.run(NAME)
        yield from self.run(_NUMBER)
        yield from self.space()
        if not name or not (yield from self.ending(ARGUMENTS)):
            return False
        yield from self.space()
        if not (yield from self.peek()):
            return False
        self.begin(name.removeprefix(_KIND))
        if (yield from self.peek()) == "<":
            self.argue("{}")
        else:
            yield from self.arguments(self.argue)
        return True
