"""Modules that are imported by the first test that uses them. Every worker collects every file, and clients are large:
imported at the top of a file they cost each worker seconds, and the garbage collector passes over them ever after.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module: `if TYPE_CHECKING: import it`, `else: it = Later("it")`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for its own marks at whatever a file holds
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
