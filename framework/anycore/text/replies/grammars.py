"""Grammars of tool calls, in llguidance's Lark: what the formats have in common."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from anycore.text.replies.parts import Spell, Tool

_SHAPES = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf")


def calls(
    bodies: Sequence[str],
    between: str | None,
    before: str = "",
    after: str = "",
    rules: Sequence[str] = (),
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
    return "\n".join([*heads, *own, *rules]) + "\n"


def named(before: str, tool: Tool, after: str, spell: Spell) -> str:
    """The name of a tool as a JSON string, and what stands around it."""
    return spell(f"{before}{json.dumps(tool.name, ensure_ascii=False)}{after}")


def arguments(tool: Tool) -> str:
    """The arguments of a tool, as JSON."""
    return inline(closed(tool.parameters))


def open_ended(schema: dict[str, Any]) -> bool:
    """Whether an object may have keys that its schema does not name, by all that the schema says."""
    return "properties" not in schema or any(schema.get(key) for key in _SHAPES)


def closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object, with no other keys than those it names unless it speaks of others."""
    schema = {"type": "object", **parameters}
    if "properties" in schema and not any(key in schema for key in _SHAPES):
        schema["additionalProperties"] = False
    return schema


def inline(schema: dict[str, Any] | bool, root: dict[str, Any] | None = None) -> str:
    """JSON that a schema accepts. `root`: the schema that it is a part of, whose definitions it may refer to."""
    from anycore.text.grammar import WHITESPACE  # here, because it asks the formats for their marks

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
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"/(?s:.{{{least},{most}}})/"


def members(parameters: dict[str, Any], items: dict[str, str], between: str) -> str:
    """Some of these items, in their order, with `between` between them: those that the schema requires, and others.

    `between` may be "". The result may match nothing at all, if nothing is required.
    """
    named = parameters.get("required")
    required = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    names = list(items)
    tails = [""]  # of the items from the last on, each behind something else
    for name in reversed(names):
        term = f"{between} {items[name]}".strip()
        tails.append(f"{term if name in required else f'({term})?'} {tails[-1]}".strip())
    tails.reverse()
    firsts = []
    for number, name in enumerate(names):
        firsts.append(f"{items[name]} {tails[number + 1]}".strip())
        if name in required:
            return f"({' | '.join(firsts)})"
    return f"({' | '.join(firsts)})?" if firsts else '""'
