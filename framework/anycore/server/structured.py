"""What a request wants its output to look like, under each of the names that clients have for it, as a grammar.

Grammars are made in a few threads of their own: hostile schemas and expressions wait for each other and for nobody
else, and no longer than SECONDS.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from anycore.engine.grammar import SECONDS
from anycore.errors import BadRequest, InvalidGrammar, Unsupported
from anycore.text import grammar

if TYPE_CHECKING:
    from anycore.server.protocol_generate import GenerateBody

T = TypeVar("T")

THREADS = 2
MAX_CHOICES = 1024
KEPT = 128  # grammars made last

DIRECT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of other servers → the key of `structured_outputs` that they are the same as."""

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="door-grammar")


async def made(make: Callable[..., T], *arguments: Any) -> T:
    """Call what makes a grammar, within the time that is allowed for it.

    Raises:
        BadRequest: it is wrong, or it takes too long.
    """
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(_threads, make, *arguments), SECONDS)
    except (TimeoutError, asyncio.TimeoutError):
        raise InvalidGrammar(f"the grammar was not made within {SECONDS:g} s: simplify it") from None


def answer_of(body: GenerateBody) -> Callable[[], str] | None:
    """Return what makes the grammar of a request's output; None if it asks for nothing.

    Raises:
        BadRequest: two fields ask, or one is malformed.
    """
    asked = {name: getattr(body, name) for name in ("response_format", "structured_outputs", *DIRECT)}
    asked = {name: value for name, value in asked.items() if value not in (None, "", [], {"type": "text"})}
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise BadRequest(f"{first} and {second} both say what the output looks like: send one of them", param=second)
    for name, value in asked.items():
        kind, what = _read(name, value)
        _check(kind, what, name)
        text = what if isinstance(what, str) else json.dumps(what, ensure_ascii=False)
        return partial(_make, kind, text, name)
    return None


def _read(name: str, value: Any) -> tuple[str, Any]:
    """Return (a key of structured_outputs, its value)."""
    if name == "response_format":
        return _response_format(value)
    if name != "structured_outputs":
        return DIRECT[name], value
    if not isinstance(value, dict):
        raise BadRequest("structured_outputs must be an object", param=name)
    given = {key: item for key, item in value.items() if item is not None and item is not False}
    known = ("json", "json_object", "regex", "choice", "grammar")
    for key in given:
        if key not in known:
            raise Unsupported(
                f"structured_outputs.{key[:40]} is not supported; it takes one of {', '.join(known)}", param=name
            )
    if len(given) != 1:
        raise BadRequest(f"structured_outputs takes one of {', '.join(known)}, {len(given)} given", param=name)
    return next(iter(given.items()))


def _response_format(value: dict[str, Any]) -> tuple[str, Any]:
    kind = value.get("type")
    if kind == "json_object":  # with a schema as in llama.cpp and older servers
        schema = value.get("schema")
        return ("json_object", True) if schema is None else ("json", schema)
    if kind != "json_schema":
        raise BadRequest(
            f"response_format.type must be text, json_object or json_schema, not {str(kind)[:40]!r}",
            param="response_format",
        )
    described = value.get("json_schema", value)  # as in /v1/responses, the schema may stand beside the type
    schema = described.get("schema") if isinstance(described, dict) else None
    if schema is None:
        raise BadRequest("response_format.json_schema.schema is missing", param="response_format")
    return "json", schema


def _check(kind: str, what: Any, param: str) -> None:
    """Raise BadRequest unless the value is of the right type for its key of structured_outputs."""
    if kind in ("regex", "grammar") and not isinstance(what, str):
        raise BadRequest(f"{param}: {kind} must be a string", param=param)
    if kind == "choice" and not (isinstance(what, list) and all(isinstance(item, str) for item in what)):
        raise BadRequest(f"{param}: choice must be a list of strings", param=param)
    if kind == "choice" and len(what) > MAX_CHOICES:
        raise BadRequest(f"{param}: choice takes at most {MAX_CHOICES} strings, {len(what)} given", param=param)


@lru_cache(KEPT)
def _make(kind: str, what: str, param: str) -> str:
    """Return the grammar of a value of structured_outputs, given as text: JSON unless it is a string already."""
    if kind == "json_object":
        return grammar.json_object()
    if kind == "json":
        return grammar.json_schema(what, param)
    if kind == "choice":
        return grammar.choice(json.loads(what), param)
    return grammar.regex(what, param) if kind == "regex" else grammar.free(what, param)
