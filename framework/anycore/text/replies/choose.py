"""Which format a model writes: the first that fits its chat template, or the one that a setting names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from anycore.config import flag
from anycore.errors import ConfigError
from anycore.text.replies.parts import ReasoningFormat, ToolFormat

F = TypeVar("F", ToolFormat, ReasoningFormat)


def choose(formats: Sequence[F], template: str, wanted: str, setting: str) -> F | None:
    """Return the format `wanted`, where "auto" is the first that fits a template and "none" is none.

    Raises:
        ConfigError: there is none of that name.
    """
    if wanted == "none":
        return None
    if wanted == "auto":
        return next((form for form in formats if form.fits(template)), None)
    for form in formats:
        if form.name == wanted:
            return form
    names = ", ".join(dict.fromkeys(["auto", "none", *(form.name for form in formats)]))
    raise ConfigError(f"{flag(setting)} must be one of {names}, not {wanted!r}", param=setting)
