"""Documented limits of Ascend operators, as exceptions that fail the call."""

from __future__ import annotations


class LimitError(RuntimeError):
    """A call that a chip would refuse, or answer with garbage."""


def need(kept: bool, limit: str) -> None:
    """Raise unless a limit is kept."""
    if not kept:
        raise LimitError(limit)
