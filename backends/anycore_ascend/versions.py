"""Which torch_npu goes with which CANN, and which driver that needs, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """One CANN release, the torch_npu builds made for it, and the oldest driver (Ascend HDK) it runs on."""

    cann: str
    torch_npu: tuple[str, ...]
    driver: str
    pythons: str


RELEASES = (
    Release("9.1.0", ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "25.2", "3.10 - 3.13"),
    Release("9.0.0", ("2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "25.0", "3.10 - 3.12"),
    Release("8.5.0", ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "25.0", "3.10 - 3.11"),
    Release("8.3.RC1", ("2.8.0", "2.7.1", "2.6.0.post3"), "25.0", "3.10 - 3.11"),
    Release("8.2.RC1", ("2.6.0",), "24.1", "3.10 - 3.11"),
)
"""Newest first. CANN before 8.2 lacks operators that the backend calls."""


def key(version: str) -> tuple[int, ...]:
    """The leading numbers, for comparing: "8.5.0" → (8, 5, 0), "25.3.RC1" → (25, 3)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def release_of(cann: str) -> Release | None:
    """The row whose version has the same two leading numbers."""
    return next((row for row in RELEASES if key(row.cann)[:2] == key(cann)[:2]), None)


def made_for(torch_npu: str) -> str | None:
    """The CANN that a torch_npu was built for; None where the table does not know it."""
    return next((row.cann for row in RELEASES if torch_npu in row.torch_npu), None)
