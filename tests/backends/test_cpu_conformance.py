"""The CPU backend against the conformance kit."""

from anycore.contract.testing import BackendConformance


class TestCpu(BackendConformance):
    backend = "cpu"
