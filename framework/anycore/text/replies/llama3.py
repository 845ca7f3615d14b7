"""Llama 3: the whole reply is `{"name": …, "parameters": {…}}`, several with `;` between them.

`<|python_tag|>` may stand before a call. Without it, JSON that is no call of a known tool is an answer like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.json_calls import JsonPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import Steps

TAG = "<|python_tag|>"
_BEFORE, _BETWEEN = '{"name": ', ', "parameters": '


class Llama3(ToolFormat):
    name: ClassVar[str] = "llama3_json"
    marks: ClassVar[tuple[str, ...]] = (TAG,)

    def fits(self, template: str) -> bool:
        return TAG in template or '{"name": function name, "parameters": dictionary' in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader({tool.name for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        bodies = [
            f"{grammars.named(_BEFORE, tool, _BETWEEN, spell)} {grammars.arguments(tool)} {spell('}')}"
            for tool in tools
        ]
        return grammars.calls(bodies, spell("; ") if parallel else None)


class _Reader(JsonPass):
    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        super().__init__()

    def read(self) -> Steps[None]:
        if (yield from self.attempt("", self._bare())):
            yield from self._more()
        while mark := (yield from self.prose(TAG)):
            if (yield from self.attempt(mark, self._tagged())):
                yield from self._more()

    def _bare(self) -> Steps[bool]:
        yield from self.space()
        return (yield from self.call(self.names))

    def _tagged(self) -> Steps[bool]:
        yield from self.space()
        if (first := (yield from self.peek())) != "{":
            return not first
        return (yield from self.call()) or not (yield from self.peek())

    def _more(self) -> Steps[None]:
        """Read further calls behind the first."""
        while not self.open and (yield from self.attempt("", self._next())):
            pass

    def _next(self) -> Steps[bool]:
        yield from self.space()
        if (yield from self.literal(";")):
            yield from self.space()
            if not (yield from self.peek()):
                return True
        if (yield from self.literal(TAG)):
            return (yield from self._tagged())
        return (yield from self.call(self.names))
