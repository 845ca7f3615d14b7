"""The conformance kit as `anycore conformance` runs it, which says for which backend."""

from __future__ import annotations

from anycore.contract.testing import BackendConformance


class TestBackend(BackendConformance):
    backend = "cpu"
