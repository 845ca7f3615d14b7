"""Values that models write without saying of what type they are: the tool's schema says it."""

from __future__ import annotations

import json
from typing import Any

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_DEEPEST = 16  # references and alternatives that are followed


def properties(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of an object's keys."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def as_json(text: str, schema: Any, root: dict[str, Any]) -> str:
    """JSON of a value that was written as `text`, perhaps without quotes.

    What may be a string and nothing else is one, whatever it looks like. Otherwise it is JSON (or Python's True, False
    and None) if it can be read so and its type is wanted, and a string if not.
    """
    wanted = types(schema, root)
    if wanted != {"string"}:
        plain = text.strip()
        plain = _WORDS.get(plain.lower(), plain)
        found = _type(plain)
        if found is not None and (not wanted or found in wanted or "string" not in wanted):
            return plain
    return json.dumps(text, ensure_ascii=False)


def types(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows; none if it does not say."""
    schema = resolved(schema, root)
    if depth > _DEEPEST:
        return set()
    named = schema.get("type")
    if named is not None:
        kinds = {named} if isinstance(named, str) else {kind for kind in named if isinstance(kind, str)}
        return kinds | {"integer"} if "number" in kinds else kinds
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return {_type(json.dumps(value)) or "null" for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [types(one, root, depth + 1) for one in schema[key]]
            return set().union(*options) if all(options) else set()
    return set()


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference to a part of `root` stands for; {} if there is none, and for true and false."""
    for _ in range(_DEEPEST):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema if isinstance(schema, dict) else {}
        schema = root
        for key in reference.lstrip("#").split("/")[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, dict) else None
    return {}


def _type(text: str) -> str | None:
    """The type of JSON text, and None if it is none. A number without a fraction is an integer."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _refuse(constant: str) -> None:
    raise ValueError(constant)
