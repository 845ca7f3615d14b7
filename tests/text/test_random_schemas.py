"""A thousand random schemas: what their grammars allow, taken at random, is valid, by jsonschema's own judgement."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from walks import Vocabulary, walk

from anycore.errors import BadRequest
from anycore.text import grammar

NAMES = ["a", "name", "größe", "x y", "$id", "items"]
CONSTANTS = [None, True, 0, -1.5, "", "щ", [1], {"k": "v"}]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("words"), [])


def schema_of(choose: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "$ref"]
    kind = choose.choice(kinds)
    if kind == "enum":
        return {"enum": choose.sample(CONSTANTS, choose.randint(1, 4))}
    if kind == "const":
        return {"const": choose.choice(CONSTANTS)}
    if kind == "anyOf":
        return {"anyOf": [schema_of(choose, depth - 1) for _ in range(choose.randint(1, 3))]}
    if kind == "$ref":
        return {"$ref": f"#/$defs/{choose.choice('pq')}"}
    return {"type": kind, **_LIMITS.get(kind, lambda *_: {})(choose, depth)}


def limits_of_strings(choose: random.Random, depth: int) -> dict[str, Any]:
    least = choose.randint(0, 3)
    return choose.choice(
        [
            {"minLength": least, "maxLength": least + choose.randint(0, 5)},
            {"pattern": choose.choice(["^[a-c]{2,4}$", r"^\d+-\d+$", "^(x|yz)*$"]), "maxLength": 40},
            {"format": choose.choice(["date", "time", "date-time", "uuid", "ipv4"])},
        ]
    )


def limits_of_numbers(choose: random.Random, depth: int) -> dict[str, Any]:
    low = choose.randint(-50, 50)
    return choose.choice(
        [{"minimum": low, "maximum": low + 20}, {"exclusiveMinimum": low, "exclusiveMaximum": low + 9}]
    )


def limits_of_objects(choose: random.Random, depth: int) -> dict[str, Any]:
    names = choose.sample(NAMES, choose.randint(0, 4))
    required = [name for name in names if choose.random() < 0.6]
    more = choose.choice([False, {"type": "integer", "minimum": 0, "maximum": 9}])
    properties = {name: schema_of(choose, depth - 1) for name in names}
    return {"properties": properties, "required": required, "additionalProperties": more}


def limits_of_arrays(choose: random.Random, depth: int) -> dict[str, Any]:
    least = choose.randint(0, 2)
    limits = {"minItems": least, "maxItems": least + choose.randint(0, 2), "items": schema_of(choose, depth - 1)}
    if choose.random() < 0.3:
        limits["prefixItems"] = [schema_of(choose, depth - 1)]
    return limits


_LIMITS = {
    "string": limits_of_strings,
    "integer": limits_of_numbers,
    "number": limits_of_numbers,
    "object": limits_of_objects,
    "array": limits_of_arrays,
}


def test_what_grammars_of_schemas_allow_is_valid(words: Vocabulary) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    cut = 0
    for seed in range(1000):
        choose = random.Random(seed)
        schema = {**schema_of(choose, 3), "$defs": {"p": schema_of(choose, 0), "q": schema_of(choose, 0)}}
        text = walk(words, grammar.json_schema(schema), seed, limit=400)
        if text is None:  # an object with further keys may go on for ever
            cut += 1
            continue
        try:
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as error:
            pytest.fail(f"seed {seed}: {text} does not fit {json.dumps(schema)}: {error}")
    assert cut < 100


HINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "string", "minLength": 2.0, "maxLength": 3.0}, {"type": "string", "minLength": 2, "maxLength": 3}),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1.0, "maxItems": 1}, {"const": [None]}),
    ({"type": "array", "items": {"const": 1}, "uniqueItems": False, "maxItems": 2}, {"type": "array"}),
    ({"type": "string", "format": "password", "maxLength": 3}, {"type": "string", "maxLength": 3}),
    ({"type": "object", "properties": {"format": {"const": "a"}}, "additionalProperties": False}, {"type": "object"}),
    ({"const": {"minLength": 5.0, "format": "binary", "uniqueItems": False}}, {"type": "object", "minProperties": 3}),
]


@pytest.mark.parametrize(("schema", "means"), HINTS)
def test_counts_with_a_point_and_remarks_are_taken(
    words: Vocabulary, schema: dict[str, Any], means: dict[str, Any]
) -> None:
    """What JSON Schema has as equal or as no constraint at all is no reason to refuse a schema."""
    for seed in range(5):
        text = walk(words, grammar.json_schema(schema), seed, limit=400)
        assert text is not None
        jsonschema.validate(json.loads(text), means)


def test_what_would_constrain_is_still_refused() -> None:
    for name, schema in {
        "minLength": {"type": "string", "minLength": 5.5},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "idn-email": {"type": "string", "format": "idn-email"},
    }.items():
        with pytest.raises(BadRequest, match=name):
            grammar.json_schema(schema)
