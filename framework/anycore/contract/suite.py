"""The conformance kit as `anycore conformance` runs it, which says for which backend, perhaps in several processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest

from anycore.contract.testing import BackendConformance

BACKEND = "ANYCORE_CONFORMANCE"
WORST_ERROR = "worst_error"

Errors = dict[str, dict[str, float]]
"""By data type: the largest "absolute" error, and the largest share "of_allowed"."""

log = logging.getLogger("anycore.conformance.errors")


class TestBackend(BackendConformance):
    backend = os.environ.get(BACKEND, "cpu")

    @pytest.fixture(autouse=True)
    def tell_errors(self, record_property: Callable[[str, object], None]) -> Iterator[None]:
        """Let the case's report carry the largest errors that its checks tell of."""
        worst = Worst()
        level, propagate = log.level, log.propagate
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.addHandler(worst)
        yield
        log.removeHandler(worst)
        log.setLevel(level)
        log.propagate = propagate
        record_property(WORST_ERROR, worst.errors)


class Worst(logging.Handler):
    """Keeps the largest error of each data type."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: Errors = {}

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        dtype, *values = record.args
        absolute, of_allowed = (float(value) for value in values)  # type: ignore[arg-type]
        merge(self.errors, {str(dtype): {"absolute": absolute, "of_allowed": of_allowed}})


def merge(errors: Errors, more: Errors) -> None:
    """Take the larger ones into `errors`, to three digits."""
    for dtype, values in more.items():
        known = errors.setdefault(dtype, dict.fromkeys(values, 0.0))
        for name, value in values.items():
            known[name] = max(known[name], float(f"{value:.3g}"))
