"""The CUDA backend against the conformance kit: every claim of its table. Needs a GPU for all but the declarations."""

from __future__ import annotations

from itertools import islice

import pytest

from anycore.contract.testing import CASES, BackendConformance, title


class TestCuda(BackendConformance):
    backend = "cuda"

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Without a GPU every case of a test is skipped for one reason, which one of them tells as well."""
        if self.spec().probe().available:
            super().pytest_generate_tests(metafunc)
            return
        for name in CASES.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, list(islice(CASES[name](self.claims()), 1)), ids=title)
