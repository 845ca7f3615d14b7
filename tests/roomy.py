"""The conformance kit on a device that has room for the engines of many cases."""

from __future__ import annotations

import gc

import pytest

from anycore.contract.testing import BackendConformance


class RoomyConformance(BackendConformance):
    @pytest.fixture(autouse=True)
    def cleared(self, request: pytest.FixtureRequest) -> None:
        """Earlier engines are looked for where memory is counted, and not after each case: the kit's models are tiny,
        and to pass over all that is alive in a process of tests takes as long as a case."""
        if request.function.__name__ == "test_stays_inside_the_plan":
            gc.unfreeze()
            gc.collect()
