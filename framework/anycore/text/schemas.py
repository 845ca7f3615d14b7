"""JSON schemas as clients send them, brought to the form that llguidance takes; what they accept stays the same."""

from __future__ import annotations

from typing import Any

COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values rather than schemas: these stay as they are, whatever their keys are called."""
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold a schema for each of several names."""
_FORMATS = """
date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference uri-template iri
iri-reference uuid json-pointer relative-json-pointer regex
"""
FORMATS = frozenset(_FORMATS.split())
"""The formats of JSON Schema. Others, such as OpenAPI's password, are remarks, which constrain nothing."""


def tidied(schema: Any) -> Any:
    """Write counts such as 5.0 as whole numbers, and leave out what constrains nothing and llguidance refuses."""
    if isinstance(schema, list):
        return [tidied(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in VALUES:
            found[key] = value
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
        elif key in BY_NAME and isinstance(value, dict):
            found[key] = {name: tidied(part) for name, part in value.items()}
        elif not _says_nothing(key, value):
            found[key] = tidied(value)
    return found


def _says_nothing(key: str, value: Any) -> bool:
    if key == "uniqueItems":
        return value is False
    return key == "format" and isinstance(value, str) and value not in FORMATS
