"""Levels of the CPU kernels that this machine runs, for tests that force each."""

from __future__ import annotations

from functools import cache

import pytest

from anycore_cpu.kernels import build
from anycore_cpu.kernels.library import Kernels, load
from anycore_cpu.probe import processor_flags

LEVELS = [level.name for level in build.LEVELS if level.runs(processor_flags())]


@cache
def kernels_of(level: str) -> Kernels:
    """Compiled by the first test that asks for it, and kept for the next time."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    return load(build.choose(processor_flags(), {build.VARIABLE: level}), threads=2)
