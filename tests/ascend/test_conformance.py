"""The Ascend backend against the conformance kit: every claim of its table, on the rig."""

from __future__ import annotations

import pytest
from roomy import RoomyConformance

BOTH = ("float16", "float32")
"""Graphs around fused operators, and plain torch without graphs: bfloat16 goes wherever float16 goes."""

STRESS = {
    "test_disturbances_lose_nothing": BOTH,
    "test_nan_stays_in_its_request": BOTH,
    "test_a_lost_device_is_heard": BOTH[:1],  # the engine's own: no operation takes part
    "test_repeats_itself": BOTH,
    "test_stays_inside_the_plan": BOTH,
    "test_a_thousand_requests_leave_nothing": BOTH,
}
"""What is for the engine, which does not know what dtype it is under."""


class TestAscend(RoomyConformance):
    backend = "ascend"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Stress comes once for each way that the backend takes, all else for every dtype."""
        if metafunc.function.__name__ in STRESS:
            metafunc.parametrize("dtype", STRESS[metafunc.function.__name__])
        else:
            super().pytest_generate_tests(metafunc)
