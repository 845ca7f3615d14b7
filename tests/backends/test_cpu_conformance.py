"""The CPU backend against the conformance kit: with its kernels, and in plain torch."""

from collections.abc import Iterator

import pytest

from anycore.contract.testing import BackendConformance
from anycore_cpu.kernels import build


class TestCpu(BackendConformance):
    backend = "cpu"


class TestPlainCpu(BackendConformance):
    backend = "cpu"
    test_ranks = None  # type: ignore[assignment]  # what ranks exchange is the same without kernels

    @pytest.fixture(scope="class", autouse=True)
    def plain(self) -> Iterator[None]:
        """Kernels switched off, as on a machine without a compiler."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(build.VARIABLE, "none")
            yield
