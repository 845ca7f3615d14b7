"""FunctionGemma and Gemma 4: `call:NAME{key:value,…}` between two marks, with strings in marks of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from anycore.text.replies import grammars
from anycore.text.replies.literals import LiteralPass
from anycore.text.replies.parts import Reader, Spell, Tool, ToolFormat
from anycore.text.replies.scan import NAME, Steps
from anycore.text.replies.values import properties, resolved, types

_DEEPEST = 16  # objects in objects that a grammar follows


class FunctionGemma(ToolFormat):
    name: ClassVar[str] = "functiongemma"
    start: ClassVar[str] = "<start_function_call>"
    opening: ClassVar[str] = start
    finish: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"
    marks: ClassVar[tuple[str, ...]] = (start, finish, quote)

    def fits(self, template: str) -> bool:
        return self.start in template

    def reader(self, tools: Sequence[Tool]) -> Reader:
        return _Reader(self, {tool.name: tool for tool in tools})

    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        values = _Values(self.quote, spell)
        bodies = [
            f"{spell(f'call:{tool.name}')} {values.object(tool.parameters, tool.parameters)} {spell(self.finish)}"
            for tool in tools
        ]
        return grammars.calls(bodies, spell(self.start) if parallel else None, rules=values.rules)


class Gemma4(FunctionGemma):
    name: ClassVar[str] = "gemma4"
    start: ClassVar[str] = "<|tool_call>"
    opening: ClassVar[str] = start
    finish: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'
    marks: ClassVar[tuple[str, ...]] = (start, finish, quote)


class _Reader(LiteralPass):
    bare = re.compile(r"[^,\[\]{}]+")  # there are no calls within calls

    def __init__(self, form: FunctionGemma, tools: dict[str, Tool]) -> None:
        self.form = form
        self.tools = tools
        super().__init__((form.quote,), None)

    def read(self) -> Steps[None]:
        while mark := (yield from self.prose(self.form.start)):
            yield from self.attempt(mark, self._block())

    def _block(self) -> Steps[bool]:
        yield from self.space()
        if not (yield from self.ending("call:")):
            return not (yield from self.peek())
        name = yield from self.run(NAME)
        if not name or not (yield from self.literal("{")):
            return not (yield from self.peek())
        self.begin(name)
        if (yield from self._arguments(self.tools.get(name))):
            yield from self.space()
            yield from self.ending(self.form.finish)
        else:
            yield from self.leave(self.form.finish)
        return True

    def _arguments(self, tool: Tool | None) -> Steps[bool]:
        """Read the arguments of a call, up to its brace."""
        root = {} if tool is None else tool.parameters
        while True:
            yield from self.space()
            if (yield from self.literal("}")):
                self.close()
                return True
            if (yield from self.literal(",")):
                continue
            key = yield from self.key()
            value = None if key is None else (yield from self.value(properties(root).get(key), root))
            if key is None or value is None:
                return False
            self.argument(key, value)


class _Values:
    """Terms of values in this notation, and the rules that they name."""

    def __init__(self, quote: str, spell: Spell) -> None:
        self.spell = spell
        self.quote = spell(quote)
        self.rules = grammars.Rules()
        self._references: dict[tuple[int, str], str] = {}  # rules of what several schemas, or itself, may name

    def object(self, schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> str:
        """An object with the keys that the schema names; with any, if it names none."""
        items = {
            key: f"{self.spell(f'{key}:')} {self.value(part, root, depth + 1)}"
            for key, part in properties(schema).items()
        }
        other = f"{grammars.KEY} {self.spell(':')} {self._any()}"
        inner = self.rules.members(schema, items, self.spell(","), other)
        return f"{self.spell('{')} {inner} {self.spell('}')}"

    def value(self, schema: Any, root: dict[str, Any], depth: int) -> str:
        """A value that a schema allows, as far as its types, its keys and listed values go."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"], root)
        schema = resolved(schema, root)
        options = schema.get("anyOf") or schema.get("oneOf")
        listed = grammars.constants(schema)
        if listed is not None:
            terms = [self._constant(value) for value in listed]
        elif depth > _DEEPEST:
            terms = []
        elif isinstance(options, list):
            terms = [self.value(option, root, depth + 1) for option in options]
        else:
            terms = [self._of_type(kind, schema, root, depth) for kind in sorted(types(schema, root))]
        return f"({' | '.join(terms)})" if terms else self._any()

    def _reference(self, reference: str, root: dict[str, Any]) -> str:
        key = id(root), reference
        if key not in self._references:
            name = self._references[key] = f"reference_{len(self._references)}"
            self.rules.add(self.value(resolved({"$ref": reference}, root), root, 0), name=name)
        return self._references[key]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote} {self.spell(value)} {self.quote}"
        return grammars.inline({"const": value})

    def _of_type(self, kind: str, schema: dict[str, Any], root: dict[str, Any], depth: int) -> str:
        if kind == "object":
            return self.object(schema, root, depth)
        if kind == "array":
            item = self.value(schema.get("items", {}), root, depth + 1)
            items = self._some(item, grammars.count(schema, "minItems") or 0, grammars.count(schema, "maxItems"))
            return f"{self.spell('[')} {items} {self.spell(']')}"
        if kind == "string":
            return self._text(schema)
        return grammars.inline({**schema, "type": kind}, root)

    def _some(self, item: str, least: int = 0, most: int | None = None) -> str:
        """Items with commas between them."""
        if most == 0:
            return ""
        more = "" if most is None else max(most - 1, 0)
        term = item if more == 0 else f"{item} ({self.spell(',')} {item}){{{max(least - 1, 0)},{more}}}"
        return term if least else f"({term})?"

    def _text(self, schema: dict[str, Any]) -> str:
        """A string in its marks. Where these are no tokens of their own, only a rule's suffix can end it."""
        text = grammars.any_text(schema)
        plain = self.quote.startswith('"')
        if plain:
            return f"{self.quote} {self.rules.add(text, f'suffix={self.quote}')}"
        return f"{self.quote} {self.rules.add(text)} {self.quote}"

    def _any(self) -> str:
        name = "any_value"
        scalar = grammars.inline({"type": ["number", "boolean", "null"]})
        array = f"{self.spell('[')} {self._some(name)} {self.spell(']')}"
        pair = f"{grammars.KEY} {self.spell(':')} {name}"
        mapping = f"{self.spell('{')} {self._some(pair)} {self.spell('}')}"
        return self.rules.add(f"{self._text({})} | {scalar} | {array} | {mapping}", name=name)
