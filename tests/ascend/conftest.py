"""Tests of the Ascend backend. They run in an interpreter of their own, which ci/ascend_suite.py makes."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

if "STANDIN_SOC" not in os.environ:
    pytest.exit("tests/ascend needs an interpreter of its own: python ci/ascend_suite.py [pytest's arguments]", 2)

import torch
import torch_npu  # noqa: F401  the rig is in place from here on
from rig.install import CALLS

from anycore.contract.backend import Backend
from anycore_ascend.support import SPEC

CROWDED = 128 * 2**20
"""Bytes held after a test from which on the garbage of earlier ones is looked for."""

COUNTS: dict[str, Counter[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "task(name): calls of torch_npu are counted for this task")


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Add what a test with the mark `task` called to that task's counts."""
    mark = request.node.get_closest_marker("task")
    before = Counter(CALLS)
    yield
    if mark is not None:
        COUNTS.setdefault(mark.args[0], Counter()).update(CALLS - before)


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Engines hold themselves in circles: a test must not find the device full of another's."""
    yield
    if torch.npu.memory_reserved() > CROWDED:
        gc.unfreeze()  # the engine's warm-up froze what was alive, earlier engines among it
        gc.collect()
        torch.npu.empty_cache()


def pytest_sessionfinish() -> None:
    if COUNTS and "STANDIN_COUNTS" in os.environ:
        Path(os.environ["STANDIN_COUNTS"], f"{os.getpid()}.json").write_text(json.dumps(COUNTS))


@pytest.fixture
def npu() -> torch.device:
    return torch.device("npu", 0)


@pytest.fixture
def ascend() -> Iterator[Backend]:
    with torch.inference_mode():
        opened = SPEC.open(0)
        yield opened
        opened.close()
