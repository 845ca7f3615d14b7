"""What every family of routes shares: the strict request body, the forms of an input, the error envelope, usage.

Requests are pydantic models, so that they are checked at the door; replies are typed dictionaries, so that each key
that is sent is written out where it is made. Both feed the OpenAPI document.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue, WithJsonSchema
from pydantic_core import CoreSchema
from typing_extensions import TypedDict

from anycore.errors import BadRequest

MAX_INPUTS = 2048  # prompts, inputs or documents in one request
MAX_TOKEN_ID = 2**31 - 1  # what any vocabulary fits under; the model's own size is checked once it is known


RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
"""What the caller calls a request: it is written to the log, so it has no line breaks and no control characters."""


class Body(BaseModel):
    """A JSON body: no coercion ("10" is no integer), no NaN, and null means the same as a field left out.

    Where a whole number is wanted, 5.0 is 5: JSON has one kind of numbers, and some clients write none without a point.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    only_counts: ClassVar[bool] = False
    """Whether the route makes nothing but tokens, so that fields about answers mean nothing."""

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        numbers = whole_fields(cls)
        return {k: whole(v) if k in numbers else v for k, v in data.items() if v is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return schema


@cache
def whole_fields(body: type[Body]) -> frozenset[str]:
    """The fields that hold whole numbers, one or a list of them."""
    return frozenset(name for name, field in body.model_fields.items() if _is_whole(field.annotation))


def _is_whole(annotation: Any) -> bool:
    parts = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part)]
    return annotation is int or (bool(parts) and all(part is NoneType or _is_whole(part) for part in parts))


def whole(value: Any) -> Any:
    """Write 5.0 as 5, alone or in a list; all else is returned as it is, such as 5.5."""
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is list and float in set(map(type, value)):
        return [whole(each) for each in value]
    return value


class Error(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(TypedDict):
    """The body of every answer that is not 2xx."""

    error: Error


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage(prompt: int, completion: int = 0, cached: int = 0) -> Usage:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def responses(model: Any, *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """Document a route's answers: `model` for 200 (or a stream), the envelope for every error a route can give.

    Only the first error brings the envelope's schema and the others name it: for each model that a route is given
    FastAPI makes a validator, a millisecond of every start.
    """
    errors = {
        400: "The request is wrong; `param` names the field",
        401: "No valid key",
        404: "No such model or route",
        405: "The route has another method",
        408: "The body came too slowly",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "The queue is full; `Retry-After` says when to try again",
        500: "The engine failed, or its output was not finite",
        503: "The model is loading, draining or gone",
        504: "The deadline passed",
    }
    named = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorEnvelope.__name__}"}}}}
    documented: dict[int | str, dict[str, Any]] = {
        status: {"description": text, **({"model": ErrorEnvelope} if status == 400 else deepcopy(named))}
        for status, text in errors.items()
    }
    answer: dict[str, Any] = {"model": model, "description": "The answer"}
    if stream:
        answer["content"] = {"text/event-stream": {}}
    return {200: answer, **documented}


def inputs(value: Any, name: str, *, allow_empty_text: bool = False) -> list[str | list[int]]:
    """Return the inputs of a field that is a string, a list of strings, a list of ids or a list of lists of ids.

    Raises:
        BadRequest: an input is empty, of another kind than the first, or not what it should be; `param` names it.
    """
    value = whole(value)
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [_one(value, name, allow_empty_text)]
    if not isinstance(value, list):
        raise BadRequest(
            f"{name} must be a string, a list of strings, or a list of token ids or of lists of them", param=name
        )
    if not value:
        raise BadRequest(f"{name} must not be an empty list", param=name)
    if len(value) > MAX_INPUTS:
        raise BadRequest(f"{name} takes at most {MAX_INPUTS} entries, {len(value)} given", param=name)
    for i, item in enumerate(value):
        if not isinstance(item, (str, list)):
            raise BadRequest(
                f"{name}[{i}] must be a string or a list of token ids, not {_kind(item)}", param=f"{name}[{i}]"
            )
        if isinstance(item, str) != isinstance(value[0], str):
            raise BadRequest(
                f"{name}[{i}] is {_kind(item)} where {name}[0] is {_kind(value[0])}; send one kind",
                param=f"{name}[{i}]",
            )
    return [_one(item, f"{name}[{i}]", allow_empty_text) for i, item in enumerate(value)]


def check_ids(ids: list[Any], name: str) -> None:
    """Refuse anything but token ids; whether the model has them is checked once it is known.

    Raises:
        BadRequest: naming the position.
    """
    for i, item in enumerate(ids):
        if not _is_id(item) or not 0 <= item <= MAX_TOKEN_ID:
            shown = item if _is_id(item) else _kind(item)
            raise BadRequest(f"{name}[{i}] must be a token id, not {shown}", param=f"{name}[{i}]")


def input_schema(name: str) -> WithJsonSchema:
    """The JSON schema of what `inputs` takes."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}, "minItems": 1}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_INPUTS}
    lists = {"type": "array", "items": ids, "minItems": 1, "maxItems": MAX_INPUTS}
    return WithJsonSchema({"title": name, "anyOf": [{"type": "string"}, texts, ids, lists]})


def _one(value: str | list[Any], name: str, allow_empty_text: bool) -> str | list[int]:
    if isinstance(value, str):
        if not value and not allow_empty_text:
            raise BadRequest(f"{name} must not be an empty string", param=name)
        return value
    if not value:
        raise BadRequest(f"{name} must not be an empty list", param=name)
    ids: list[int] = whole(value)
    check_ids(ids, name)
    return ids


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    names = {
        str: "a string",
        list: "a list",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        dict: "an object",
    }
    return names.get(type(value), "null")
