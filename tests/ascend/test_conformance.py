"""The Ascend backend against the conformance kit: every claim of its table, on the rig."""

from __future__ import annotations

from anycore.contract.testing import BackendConformance


class TestAscend(BackendConformance):
    backend = "ascend"
