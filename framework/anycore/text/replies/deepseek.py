"""DeepSeek: calls between marks of their own: kind, name and fenced JSON (V3, R1), or name and JSON (V3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.json_calls import JsonPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import NAME, Steps

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


class DeepSeekV31(ToolFormat):
    name: ClassVar[str] = "deepseek_v31"
    opening: ClassVar[str] = START
    marks: ClassVar[tuple[str, ...]] = (START, END, CALL, SEPARATOR, CALL_END)
    before: ClassVar[str] = ""  # the name
    behind: ClassVar[str] = SEPARATOR  # it
    after: ClassVar[str] = ""  # the arguments
    between: ClassVar[str] = ""  # calls

    def fits(self, template: str) -> bool:
        return CALL in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader()

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        bodies = [
            f"{spell(f'{CALL}{self.before}{tool.name}{self.behind}')} {grammars.arguments(tool)}"
            f" {spell(f'{self.after}{CALL_END}')}"
            for tool in tools
        ]
        return grammars.calls(bodies, spell(self.between) if parallel else None, after=spell(END))


class DeepSeekV3(DeepSeekV31):
    name: ClassVar[str] = "deepseek_v3"
    before: ClassVar[str] = f"function{SEPARATOR}"
    behind: ClassVar[str] = f"\n{_FENCE}json\n"
    after: ClassVar[str] = f"\n{_FENCE}"
    between: ClassVar[str] = "\n"

    def fits(self, template: str) -> bool:
        return CALL in template and f"{_FENCE}json" in template


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
        kind = yield from self.run(NAME)
        if not kind or not (yield from self.literal(SEPARATOR)):
            return False
        yield from self.space()
        name = (yield from self.run(NAME)) if kind == "function" else ""
        yield from self.space()
        if not (yield from self.peek()):
            return False
        if name and (yield from self.literal(f"{_FENCE}json", _FENCE)):
            yield from self.space()
        self.begin(name or kind)
        if (yield from self.peek()) == "<":
            self.argue("{}")
        else:
            yield from self.arguments(self.argue)
        return True
