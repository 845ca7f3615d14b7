"""Grammars of tool calls, in llguidance's Lark: what the formats have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anycore.text.grammar import WHITESPACE
from anycore.text.replies.parts import Spell, Tool

_SHAPES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


KEY = "/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"  # of an argument that no schema names


class Rules:
    """Rules that terms are made of. The same rule is made once."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}  # by name
        self._names: dict[str, str] = {}  # of those that have none of their own, by body

    def lines(self) -> list[str]:
        return [f"{name}{body}" for name, body in self._bodies.items()]

    def add(self, body: str, option: str = "", name: str = "") -> str:
        """Return the name of a rule with this body; `name` is for one that is named elsewhere, perhaps by itself."""
        body = f"[{option}]: {body}" if option else f": {body}"
        name = name or self._names.setdefault(body, f"part_{len(self._names)}")
        self._bodies[name] = body
        return name

    def members(self, schema: dict[str, Any], items: dict[str, str], between: str, other: str) -> str:
        """What an object holds: items for keys in their order, those that it requires and others.

        Args:
            between: the term between two items, perhaps "".
            other: an item for any key. Any number of them may stand in objects whose schema names no keys.
        """
        if not items:
            return f"({other} ({between} {other})*)?" if _open_ended(schema) else ""
        named = schema.get("required")
        required = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
        rules = {key: self.add(item) for key, item in items.items()}
        firsts: list[str] = []
        rest = ""  # the items behind the one under way, each behind another
        for key in reversed(rules):
            first = f"{rules[key]} {rest}".rstrip()
            firsts = [first] if key in required else [first, *firsts]
            term = f"{between} {rules[key]}".lstrip()
            rest = self.add(f"{term if key in required else f'({term})?'} {rest}".rstrip())
        return f"({' | '.join(firsts)}){'' if required & set(rules) else '?'}"


def calls(
    bodies: Sequence[str],
    between: str | None,
    before: str = "",
    after: str = "",
    rules: Rules | None = None,
) -> str:
    """The rules of calls, each of which has one of these bodies.

    Args:
        between: what stands between two calls; None: there is one call.
        before, after: what stands around all of them, behind the opening.
        rules: of what the bodies name.
    """
    names = [f"call_{number}" for number in range(len(bodies))]
    more = "" if between is None else f" ({between} call)*"
    heads = [f"calls: {before} call{more} {after}".rstrip(), f"call: {' | '.join(names)}"]
    own = [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join([*heads, *own, *(rules.lines() if rules else ())]) + "\n"


def named(before: str, tool: Tool, after: str, spell: Spell) -> str:
    """The name of a tool as a JSON string, and what stands around it."""
    return spell(f"{before}{json.dumps(tool.name, ensure_ascii=False)}{after}")


def arguments(tool: Tool) -> str:
    """The arguments of a tool, as JSON."""
    return inline(closed(tool.parameters))


def closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object, with no other keys than those it names unless it speaks of others."""
    schema = {"type": "object", **parameters}
    if "properties" in schema and not any(key in schema for key in _SHAPES):
        schema["additionalProperties"] = False
    return schema


def inline(schema: dict[str, Any] | bool, root: dict[str, Any] | None = None) -> str:
    """JSON that a schema accepts. `root`: the schema that it is a part of, whose definitions it may refer to."""
    schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
    shared = {key: value for key, value in (root or {}).items() if key in ("$defs", "definitions")}
    guidance = {"whitespace_pattern": WHITESPACE}
    return f"%json {json.dumps({**shared, **schema, 'x-guidance': guidance}, ensure_ascii=False)}"


def constants(schema: Any) -> list[Any] | None:
    """The values that a schema lists, and None if it does not."""
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [schema["const"]] if isinstance(schema, dict) and "const" in schema else None


def any_text(schema: dict[str, Any]) -> str:
    """A regular expression of text as long as a schema allows."""
    most = count(schema, "maxLength")
    return f"/(?s:.{{{count(schema, 'minLength') or 0},{'' if most is None else most}}})/"


def count(schema: dict[str, Any], key: str) -> int | None:
    """A number of things that a schema states; None if it does not."""
    found = schema.get(key)
    return found if isinstance(found, int) and found >= 0 else None


def _open_ended(schema: dict[str, Any]) -> bool:
    """Whether an object may have keys that its schema does not name, by all that the schema says."""
    return "properties" not in schema or any(schema.get(key) for key in _SHAPES)
