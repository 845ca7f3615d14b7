"""Tests of the Ascend backend. They run in an interpreter of their own, which ci/ascend_suite.py makes."""

from __future__ import annotations

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


def pytest_sessionfinish() -> None:
    if COUNTS and "STANDIN_COUNTS" in os.environ:
        Path(os.environ["STANDIN_COUNTS"], f"{os.getpid()}.json").write_text(json.dumps(COUNTS))


@pytest.fixture
def npu() -> torch.device:
    return torch.device("npu", 0)
