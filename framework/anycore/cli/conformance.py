"""Proves what a backend declares: every row of its table, on the device of this machine, against exact results.

Needs pytest. Exits with 0 only if a device was there and every case passed. The report is the evidence that `anycore
matrix` shows on this machine, until the table or the kit changes; with --report, also what a backend keeps beside its
table for everyone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anycore import __version__, evidence, plugins
from anycore.cli.flags import Parser
from anycore.errors import ConfigError, PluginError

QUICK = 8
"""With --quick, one in so many cases of attention is run."""

NEEDED = ("pytest", "transformers")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("backend", metavar="BACKEND", help="name of the backend, as in anycore matrix")
    parser.add_argument("--quick", action="store_true", help=f"one in {QUICK} cases of attention, everything else")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report here, too (JSON)")


def run(options: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"anycore conformance needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    spec = plugins.load().backend(options.backend)
    probe = spec.probe()
    if not probe.available:
        raise PluginError(f"no {spec.name} device: {probe.reason}. {probe.advice}", param="backend")
    tally = Tally(options.quick)
    code = collect(options.backend, tally)
    device = probe.devices[0]
    words = ["anycore conformance", options.backend, *(["--quick"] if options.quick else [])]
    report = {
        "backend": spec.name,
        "device": device.name,
        "chip": device.chip,
        "date": time.strftime("%Y-%m-%d"),
        "table": evidence.table_hash(spec),
        "kit": evidence.kit_hash(),
        "quick": options.quick,
        "versions": {**probe.versions, "anycore": __version__, "python": platform.python_version()},
        "command": " ".join(words),
        "conformance": tally.as_dict(),
    }
    own = evidence.local_report(spec, device.chip, options.quick)
    own.parent.mkdir(parents=True, exist_ok=True)
    for path in (own, options.report):
        if path is not None:
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            print(f"report written to {path}")
    return 0 if code == 0 and tally.counts["passed"] else 1


def collect(backend: str, tally: Tally) -> int:
    """Run pytest on the kit, without the settings of whatever project this is called in."""
    import pytest

    from anycore.contract.suite import TestBackend

    TestBackend.backend = backend
    words = ["--pyargs", "anycore.contract.suite", "-c", os.devnull, "-q", "--tb=short"]
    words += ["-p", "no:cacheprovider", "-p", "no:logging"]
    log = logging.getLogger("anycore.conformance.errors")
    level, log.propagate = log.level, False
    log.setLevel(logging.DEBUG)
    log.addHandler(tally.worst)
    try:
        return int(pytest.main(words, plugins=[tally]))
    finally:
        log.removeHandler(tally.worst)
        log.setLevel(level)
        log.propagate = True


class Worst(logging.Handler):
    """Keeps the largest error of each data type that the checks tell of, and its largest share of what is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, dict[str, float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        dtype, *values = record.args
        known = self.errors.setdefault(str(dtype), {"absolute": 0.0, "of_allowed": 0.0})
        for name, value in zip(known, values, strict=True):
            known[name] = max(known[name], float(f"{float(value):.3g}"))  # type: ignore[arg-type]


class Tally:
    """A pytest plugin that counts, remembers failures, and leaves cases out if asked to be quick."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.worst = Worst()
        self.started = time.monotonic()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.quick:
            items[:] = [
                item for i, item in enumerate(items) if i % QUICK == 0 or "_case" not in " ".join(item.fixturenames)
            ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            self.failures[report.nodeid.rpartition("::")[2]] = lines[-1] if lines else ""

    def as_dict(self) -> dict[str, Any]:
        kinds = {kind: self.counts[kind] for kind in ("passed", "failed", "skipped")}
        seconds = round(time.monotonic() - self.started, 1)
        return {**kinds, "seconds": seconds, "worst_error": self.worst.errors, "failures": self.failures}
