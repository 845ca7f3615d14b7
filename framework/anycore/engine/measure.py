"""Predicted against measured: what the device says that each term of the memory plan has become."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anycore.engine.memory import MemoryPlan, size

if TYPE_CHECKING:
    from anycore.contract.backend import Memory

log = logging.getLogger(__name__)


class Meter:
    """Measures the parts of a start, one after the other. `found` holds bytes by term."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.found: dict[str, int] = {}
        self._held = memory.held()

    def mark(self, name: str) -> None:
        """What is held now and was not at the last mark is this term's."""
        held = self.memory.held()
        if held is not None and self._held is not None:
            self.found[name] = held - self._held
        self._held = held

    @contextmanager
    def working(self) -> Iterator[None]:
        """The highest use inside the block: the warm-up's, whose steps are short."""
        with self.memory.peak() as peak:
            yield
        if peak.bytes and self._held is not None:
            self.found["working"] = peak.bytes


def report(plan: MemoryPlan, found: dict[str, int]) -> list[str]:
    """One line a term: planned, measured, and how far they are apart."""
    lines = []
    for name, measured in found.items():
        planned = plan.terms.get(name, plan.working.total)
        off = f"{100 * (measured / planned - 1):+.1f} %" if name in plan.terms and planned else "so far"
        lines.append(f"memory of {name}: {size(planned)} planned, {size(measured)} measured ({off})")
    return lines
