"""What has been proven of a backend: reports of the conformance kit, from beside its table and from this machine.

A report counts as long as the table and the kit are those that it was made with. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from anycore.config import cache_dir
from anycore.contract.declare import BackendSpec, Level, Support

DECLARED = "declared"
KIT = ("check*.py", "endtoend*.py", "suite.py", "testing.py")
"""The files under `contract/` that the kit is made of."""


class Results(msgspec.Struct, frozen=True):
    """How the cases went."""

    passed: int
    failed: int
    skipped: int


class Report(msgspec.Struct, frozen=True):
    """What `anycore conformance` writes, as far as it is read here. Reports older than the hashes lack them."""

    device: str
    chip: str
    date: str
    conformance: Results
    table: str = ""
    kit: str = ""
    quick: bool = False
    complete: bool = True  # False of a run that was broken off, which proves nothing


def table_hash(spec: BackendSpec) -> str:
    """A short hash of all that a backend's table claims."""
    return _short(json.dumps(msgspec.to_builtins(spec.support), sort_keys=True).encode())


def kit_hash() -> str:
    """A short hash of the kit's source."""
    folder = Path(__file__).parent / "contract"
    files = sorted(path for pattern in KIT for path in folder.glob(pattern))
    return _short(b"\0".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files))


def local_report(spec: BackendSpec, chip: str, quick: bool = False) -> Path:
    """Where this machine keeps what it has proven itself; a quick run does not replace a whole one."""
    return cache_dir() / "evidence" / f"{spec.name}-{chip}{'-quick' if quick else ''}.json"


def read_reports(spec: BackendSpec) -> tuple[list[Report], list[str]]:
    """Return a backend's reports, the newest of each device, and a line for each file that is none.

    A quick run counts where no whole one is up to date.
    """
    folders = [path for path in (spec.evidence, cache_dir() / "evidence") if path is not None]
    files = [*(folders[0].glob("*.json") if spec.evidence else ()), *folders[-1].glob(f"{spec.name}-*.json")]
    newest: dict[tuple[str, bool], Report] = {}
    troubles = []
    for path in sorted(files, key=lambda path: (path.parent == folders[-1], path.name)):
        try:
            report = msgspec.json.decode(path.read_bytes(), type=Report)
        except (OSError, msgspec.DecodeError) as error:
            troubles.append(f"{path} is not a report of anycore conformance: {error}")
            continue
        if not report.complete:
            troubles.append(f"{path} is of a run that was broken off: run anycore conformance {spec.name} again")
            continue
        known = newest.get((report.device, report.quick))
        if known is None or known.date <= report.date:
            newest[report.device, report.quick] = report
    whole = {report.device for report in newest.values() if not report.quick and not changes(spec, report)}
    return [report for report in newest.values() if not (report.quick and report.device in whole)], troubles


def standing(spec: BackendSpec, row: Support, reports: Iterable[Report]) -> str:
    """Say how far a row can be trusted: "declared", or what was found on each device that it was tried on."""
    if row.level is Level.UNSUPPORTED:
        return ""
    tried = [report for report in reports if not row.chips or report.chip in row.chips]
    return "; ".join(verdict(spec, report) for report in tried) or DECLARED


def verdict(spec: BackendSpec, report: Report) -> str:
    """Say what a report proves of the table as it stands today."""
    where = f"{report.device}, {report.date}"
    changed = changes(spec, report)
    if changed:
        return f"stale: {' and '.join(changed)} changed since {where}"
    if report.conformance.failed or not report.conformance.passed:
        return f"refuted on {where}: {report.conformance.failed} cases fail"
    return f"proven{' in part' if report.quick else ''} on {where}"


def changes(spec: BackendSpec, report: Report) -> list[str]:
    """What has changed since a report: the table, the kit, or both."""
    hashes = (("table", report.table, table_hash(spec)), ("kit", report.kit, kit_hash()))
    return [name for name, then, now in hashes if then != now]


def as_rows(spec: BackendSpec) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the table as plain data, each row with its standing, and what is wrong with evidence files."""
    reports, troubles = read_reports(spec)
    rows = [{**msgspec.to_builtins(row), "evidence": standing(spec, row, reports)} for row in spec.support]
    return rows, troubles


def of_row(spec: BackendSpec, row: Support, chip: str | None = None) -> str:
    """The standing of one row, on one chip where it is named."""
    reports, _ = read_reports(spec)
    return standing(spec, row, [report for report in reports if chip is None or report.chip == chip])


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
