"""The conformance kit for the backend that `ANYCORE_CONFORMANCE` names: what `anycore conformance` runs."""

from __future__ import annotations

import os

from anycore.contract.testing import BackendConformance


class TestBackend(BackendConformance):
    backend = os.environ.get("ANYCORE_CONFORMANCE", "cpu")
