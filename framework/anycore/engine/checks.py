"""Checks of single values that a caller gives, for the classes of `request.py`.

They run for every request, and nearly always pass: plain types are let through before others are looked at.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from anycore.errors import BadRequest

NUMBERS = (int, float)  # what values are in nearly all cases: others are looked at more closely


def within(name: str, value: Any, low: float, high: float) -> None:
    """Raise BadRequest unless value is a number and low ≤ value ≤ high; NaN fails."""
    if type(value) not in NUMBERS and (type(value) is bool or not isinstance(value, Real)):
        raise BadRequest(f"{name} must be a number, not {value!r}", param=name)
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, not {value}", param=name)


def whole(name: str, value: Any, low: int, high: int) -> None:
    """Raise BadRequest unless value is a whole number and low ≤ value ≤ high."""
    if type(value) is not int and isinstance(value, Real) and not isinstance(value, Integral):
        raise BadRequest(f"{name} must be a whole number, not {value!r}", param=name)
    within(name, value, low, high)


def all_are(name: str, values: Any, kind: type) -> None:
    """Raise BadRequest unless values are several, each of a kind: texts, or token ids."""
    what = "texts" if kind is str else "token ids"
    if not isinstance(values, list | tuple | set | frozenset | dict):
        raise BadRequest(f"{name} must hold {what}, not be {values!r}", param=name)
    for value in values:
        if type(value) is not kind and (
            isinstance(value, bool) or not isinstance(value, str if kind is str else Integral)
        ):
            raise BadRequest(f"{name} must hold {what}, not {value!r}", param=name)
