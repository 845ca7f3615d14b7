"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and from Small 3.2 on `[TOOL_CALLS]NAME[ARGS]{…}`.

The newer form may have `[CALL_ID]` and an id behind the name, and may do without `[ARGS]`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.json_calls import JsonPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import NAME, Steps

START, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"\w+")
_BEFORE, _BETWEEN = '{"name": ', ', "arguments": '


class Mistral(ToolFormat):
    name: ClassVar[str] = "mistral"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, CALL_ID, ARGS)

    def fits(self, template: str) -> bool:
        return START in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader()

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """The newer form where the vocabulary has a token for it."""
        if not spell(ARGS).startswith('"'):
            bodies = [f"{spell(f'{tool.name}{ARGS}')} {grammars.arguments(tool)}" for tool in tools]
            return grammars.calls(bodies, spell(START) if parallel else None)
        bodies = [
            f"{grammars.named(_BEFORE, tool, _BETWEEN, spell)} {grammars.arguments(tool)} {spell('}')}"
            for tool in tools
        ]
        return grammars.calls(bodies, spell(", ") if parallel else None, spell(" ["), spell("]"))

    def call_id(self) -> str:
        """Nine letters and digits, and nothing else, is what the templates take."""
        return uuid.uuid4().hex[:9]


class _Reader(JsonPass):
    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(START)):
            yield from self.attempt(mark, self._block())

    def _block(self) -> Steps[bool]:
        if NAME.match((yield from self.peek())):
            return (yield from self._named()) or not (yield from self.peek())
        yield from self.space()
        if (yield from self.literal("[")):
            return (yield from self._list())
        if (first := (yield from self.peek())) != "{":
            return not first
        return (yield from self.call()) or not (yield from self.peek())

    def _list(self) -> Steps[bool]:
        while True:
            yield from self.space()
            if (yield from self.literal("]")):
                return True
            if (yield from self.literal(",")):
                yield from self.space()
            if not (yield from self.call()):
                return not (yield from self.peek())

    def _named(self) -> Steps[bool]:
        name = yield from self.run(NAME)
        yield from self.space()
        mark = yield from self.literal(CALL_ID, ARGS)
        if mark == CALL_ID:
            yield from self.run(_ID)
            mark = yield from self.literal(ARGS)
        yield from self.space()
        if not mark and (yield from self.peek()) != "{":
            return False
        self.begin(name)
        yield from self.arguments(self.argue)
        return True
