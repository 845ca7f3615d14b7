"""What callers of `LLM` hand in, as lists of texts and token ids: they have arrays, tensors and generators, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from anycore.errors import BadRequest

Prompt = str | list[int]


def prompts_of(given: Any, param: str) -> list[Prompt]:
    """One prompt or several, as a list. Whole numbers in a row are one prompt of token ids.

    What is neither text nor a row is left as it is, for the check of each prompt.

    Raises:
        BadRequest: these are no prompts at all; it names `param`.
    """
    if isinstance(given, str):
        return [given]
    items = listed(given, param)
    if items and isinstance(items[0], Integral):
        return [ids_of(items)]
    return [item if isinstance(item, str) else ids_of(item) for item in items]


def texts_of(given: Any, param: str) -> list[str]:
    """One text or several, as a list.

    Raises:
        BadRequest: it is something else, or one of them is; it names the place.
    """
    items = [given] if isinstance(given, str) else listed(given, param)
    for i, item in enumerate(items):
        text_of(item, f"{param}[{i}]")
    return items


def text_of(given: Any, param: str) -> str:
    """Return a text.

    Raises:
        BadRequest: it is none.
    """
    if not isinstance(given, str):
        raise BadRequest(f"{param} must be a text (str), not {type(given).__name__}", param=param)
    return given


def listed(given: Any, param: str) -> list[Any]:
    """The items of a list, an array or anything else that can be gone through once.

    Raises:
        BadRequest: it is bytes, a mapping, or has no items.
    """
    if callable(getattr(given, "tolist", None)):  # of numpy, torch and their like, without importing them
        given = given.tolist()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | bytearray | Mapping):
        raise BadRequest(f"{param} must be a text or a list, not {type(given).__name__}", param=param)
    return list(given)


def ids_of(given: Any) -> Any:
    """Token ids as a list of plain integers, where that is what they are."""
    if callable(getattr(given, "tolist", None)):
        given = given.tolist()
    if not isinstance(given, list | tuple):
        return given
    return [int(i) if type(i) is not bool and isinstance(i, Integral) else i for i in given]
