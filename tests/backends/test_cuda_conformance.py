"""The CUDA backend against the conformance kit: every claim of its table. Needs a GPU for all but the declarations."""

from __future__ import annotations

from anycore.contract.testing import BackendConformance


class TestCuda(BackendConformance):
    backend = "cuda"
