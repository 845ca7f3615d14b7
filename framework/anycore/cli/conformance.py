"""Proves what a backend declares: every row of its table, on the device of this machine, against exact results.

Needs pytest. Exits with 0 only if a device was there and every case passed. The report is the evidence that `anycore
matrix` shows on this machine, until the table or the kit changes; with --report, also what a backend keeps beside its
table for everyone. That file is there from the start: of a run that is broken off it says what had come until then,
and that it is not complete, so that it proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anycore import __version__, evidence, plugins
from anycore.cli.flags import Parser
from anycore.errors import ConfigError, PluginError

QUICK = 8
"""With --quick, one in so many cases of attention is run."""

BACKEND = "ANYCORE_CONFORMANCE"
"""Tells contract/suite.py which backend it is about, in every process."""

EVERY = 3.0
"""Seconds between two writings of a report that is not complete."""

ENDED = (0, 1)
"""What pytest returns of a run that came to its end, without and with failures."""

NEEDED = ("pytest", "transformers")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("backend", metavar="BACKEND", help="name of the backend, as in anycore matrix")
    parser.add_argument("--quick", action="store_true", help=f"one in {QUICK} cases of attention, everything else")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="run cases side by side (pytest-xdist)")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the report here, too (JSON)")


def run(options: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"anycore conformance needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if options.processes > 1 and find_spec("xdist") is None:
        raise ConfigError("--processes needs pytest-xdist: pip install pytest-xdist", param="processes")
    if options.processes > 1 and options.quick:
        raise ConfigError("--quick runs in one process: leave out --processes", param="processes")
    spec = plugins.load().backend(options.backend)
    probe = spec.probe()
    if not probe.available:
        raise PluginError(f"no {spec.name} device: {probe.reason}. {probe.advice}", param="backend")
    device = probe.devices[0]
    words = ["anycore conformance", options.backend, *(["--quick"] if options.quick else [])]
    facts = {
        "backend": spec.name,
        "device": device.name,
        "chip": device.chip,
        "date": time.strftime("%Y-%m-%d"),
        "table": evidence.table_hash(spec),
        "kit": evidence.kit_hash(),
        "quick": options.quick,
        "versions": {**probe.versions, "anycore": __version__, "python": platform.python_version()},
        "command": " ".join(words),
    }

    def write(path: Path, complete: bool) -> None:
        replace_file(path, {**facts, "complete": complete, "conformance": tally.as_dict()})

    tally = Tally(options.quick, None if options.report is None else partial(write, options.report, False))
    tally.tell()
    code = collect(options.backend, tally, options.processes)
    complete = code in ENDED
    own = evidence.local_report(spec, device.chip, options.quick)
    for path in (own if complete else None, options.report):
        if path is not None:
            write(path, complete)
            print(f"report{'' if complete else ' of a run that was broken off'} written to {path}")
    return 0 if code == 0 and tally.counts["passed"] else 1


def replace_file(path: Path, content: dict[str, Any]) -> None:
    """Write JSON; whoever reads meanwhile finds the file as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    new.replace(path)


def collect(backend: str, tally: Tally, processes: int = 1) -> int:
    """Run pytest on the kit, without the settings of whatever project this is called in."""
    import pytest

    os.environ[BACKEND] = backend
    os.environ.pop("PYTEST_ADDOPTS", None)  # those, too: "-n 2" in it would run all cases, --quick or not
    if processes > 1:  # each would start a thread a core, and they would keep one another from working
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    words = ["--pyargs", "anycore.contract.suite", "-c", os.devnull, "-q", "--tb=short"]
    words += ["-p", "no:cacheprovider", "-p", "no:logging"]
    words += ["-n", str(processes)] if processes > 1 else []
    return int(pytest.main(words, plugins=[tally]))


class Tally:
    """A pytest plugin that counts, remembers failures, and leaves cases out if asked to be quick.

    `tell` is called while cases end, at most every few seconds.
    """

    def __init__(self, quick: bool, tell: Callable[[], None] | None = None) -> None:
        self.quick = quick
        self._tell = tell
        self._next = 0.0  # moment from which on it is told again
        self.counts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.worst: dict[str, dict[str, float]] = {}
        self.started = time.monotonic()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.quick:
            items[:] = [
                item for i, item in enumerate(items) if i % QUICK == 0 or "_case" not in " ".join(item.fixturenames)
            ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            from anycore.contract.suite import WORST_ERROR, merge

            for name, errors in report.user_properties:
                if name == WORST_ERROR:
                    merge(self.worst, errors)
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            name, why = report.nodeid.rpartition("::")[2], lines[-1] if lines else ""
            self.failures[name] = why
            print(f"\nfailed: {name}: {why}", flush=True)  # at once: a run that is broken off has told

        self.tell()

    def tell(self) -> None:
        now = time.monotonic()
        if self._tell is not None and now >= self._next:
            self._tell()
            self._next = now + EVERY

    def as_dict(self) -> dict[str, Any]:
        kinds = {kind: self.counts[kind] for kind in ("passed", "failed", "skipped")}
        seconds = round(time.monotonic() - self.started, 1)
        return {**kinds, "seconds": seconds, "worst_error": self.worst, "failures": self.failures}
