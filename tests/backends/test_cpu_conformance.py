"""The CPU backend against the conformance kit: with its kernels, and in plain torch."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from roomy import RoomyConformance

from anycore.contract.declare import Support
from anycore_cpu.kernels import build

ONCE = ("test_disturbances_lose_nothing", "test_repeats_itself", "test_a_thousand_requests_leave_nothing")


class TestCpu(RoomyConformance):
    backend = "cpu"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """What is for the engine alone comes once: float32, where ids are compared."""
        if metafunc.function.__name__ in ("test_disturbances_lose_nothing", "test_a_lost_device_is_heard"):
            metafunc.parametrize("dtype", ["float32"])
        else:
            super().pytest_generate_tests(metafunc)


class TestPlainCpu(RoomyConformance):
    """What differs without kernels: operations, steps that are not replayed, and the plan of memory."""

    backend = "cpu"

    test_a_lost_device_is_heard = None  # the engine's own: no operation takes part
    test_ranks = None  # what ranks hold and exchange is the same with other products

    @pytest.fixture(scope="class", autouse=True)
    def plain(self) -> Iterator[None]:
        """Kernels switched off, as on a machine without a compiler."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(build.VARIABLE, "none")
            yield

    @classmethod
    def claims(cls) -> list[Support]:
        """Torch gathers blocks of all sizes alike."""
        return [
            replace(row, block_sizes=tuple(size for size in row.block_sizes if size in (1, 16, 128)))
            for row in super().claims()
        ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Stress is for the engine, which does not know what dtype it is under: float32, where ids are compared."""
        if metafunc.function.__name__ in ONCE:
            metafunc.parametrize("dtype", ["float32"])
        else:
            super().pytest_generate_tests(metafunc)
