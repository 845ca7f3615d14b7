"""Evidence: what a report proves, and that a changed table or kit makes it stale where everyone sees it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anycore_echo import Script
from anycore_echo import spec as echo
from installed import KIT, own_cache

from anycore import evidence
from anycore.cli import conformance
from anycore.cli.main import main
from anycore.contract import testing
from anycore.contract.declare import BackendSpec, Level
from anycore.evidence import DECLARED, of_row, read_reports, table_hash


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendSpec:
    """A backend with a folder for evidence, on a machine that has proven nothing yet."""
    monkeypatch.setenv("ANYCORE_CACHE", str(own_cache(tmp_path / "cache")))
    (tmp_path / "evidence").mkdir()
    made = echo(Script())
    rows = (replace(made.support[0], chips=("c1",)), replace(made.support[0], chips=("c2",)))
    return replace(made, support=rows, evidence=tmp_path / "evidence")


def write(spec: BackendSpec, path: Path | None = None, **fields: Any) -> None:
    report = {
        "device": "a board",
        "chip": "c1",
        "date": "2026-01-02",
        "table": table_hash(spec),
        "kit": evidence.kit_hash(),
        "conformance": {"passed": 9, "failed": 0, "skipped": 1},
    }
    assert spec.evidence is not None
    path = path or spec.evidence / f"{fields.get('device', 'board')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report | fields))


def standings(spec: BackendSpec) -> list[str]:
    return [of_row(spec, row) for row in spec.support]


def test_without_reports_rows_are_declared(spec: BackendSpec) -> None:
    assert standings(spec) == [DECLARED, DECLARED]


def test_a_report_proves_the_rows_of_its_chip(spec: BackendSpec) -> None:
    write(spec)
    assert standings(spec) == ["proven on a board, 2026-01-02", DECLARED]


def test_what_is_refused_needs_no_proof(spec: BackendSpec) -> None:
    write(spec)
    assert of_row(spec, replace(spec.support[0], level=Level.UNSUPPORTED)) == ""


def test_a_quick_run_proves_a_part(spec: BackendSpec) -> None:
    write(spec, quick=True)
    assert standings(spec)[0] == "proven in part on a board, 2026-01-02"


def test_a_quick_run_adds_nothing_to_a_whole_one_unless_that_is_stale(spec: BackendSpec) -> None:
    write(spec, evidence.local_report(spec, "c1", quick=True), quick=True, date="2026-01-09")
    write(spec)
    assert standings(spec)[0] == "proven on a board, 2026-01-02"
    write(spec, kit="another")
    assert set(standings(spec)[0].split("; ")) == {
        "stale: kit changed since a board, 2026-01-02",
        "proven in part on a board, 2026-01-09",
    }


def test_a_failed_run_is_shown(spec: BackendSpec) -> None:
    write(spec, conformance={"passed": 9, "failed": 2, "skipped": 0})
    assert standings(spec)[0] == "refuted on a board, 2026-01-02: 2 cases fail"


def test_a_changed_table_makes_it_stale(spec: BackendSpec) -> None:
    write(spec)
    changed = replace(spec, support=(replace(spec.support[0], head_dims=(64,)), spec.support[1]))
    assert standings(changed)[0] == "stale: table changed since a board, 2026-01-02"


def test_a_changed_kit_makes_it_stale(spec: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    write(spec)
    monkeypatch.setattr(evidence, "kit_hash", lambda: "another")
    assert standings(spec)[0] == "stale: kit changed since a board, 2026-01-02"


def test_a_report_of_before_the_hashes_is_stale(spec: BackendSpec) -> None:
    write(spec, table="", kit="")
    assert standings(spec)[0] == "stale: table and kit changed since a board, 2026-01-02"


def test_options_of_the_project_around_it_do_not_reach_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 2")
    monkeypatch.setenv(conformance.BACKEND, "none")
    seen = []
    monkeypatch.setattr(pytest, "main", lambda words, plugins: seen.append(os.environ.get("PYTEST_ADDOPTS")) or 0)
    assert conformance.collect("echo", conformance.Tally(quick=True)) == 0
    assert seen == [None]


def test_the_hash_of_the_kit_is_of_every_file_that_checks() -> None:
    folder = Path(evidence.__file__).parent / "contract"
    hashed = {path.name for pattern in evidence.KIT for path in folder.glob(pattern)}
    files = {Path(value.__code__.co_filename) for value in vars(testing).values() if hasattr(value, "__code__")}
    used = {file.name for file in files if folder.parent in file.parents}
    assert {"checks.py", "testing.py", "endtoend.py", "suite.py"} <= hashed
    assert used - hashed == {"plugins.py"}  # `load`


def test_the_newest_report_of_a_device_counts_and_devices_stand_side_by_side(spec: BackendSpec) -> None:
    write(spec, conformance={"passed": 9, "failed": 2, "skipped": 0})
    own = evidence.local_report(spec, "c1")
    write(spec, own, date="2026-01-03")
    write(spec, device="another")
    assert standings(spec)[0] == "proven on another, 2026-01-02; proven on a board, 2026-01-03"


def test_a_file_that_is_no_report_is_named(spec: BackendSpec) -> None:
    assert spec.evidence is not None
    (spec.evidence / "bad.json").write_text('{"device": 3}')
    reports, (trouble,) = read_reports(spec)
    assert reports == []
    assert "bad.json is not a report of anycore conformance" in trouble


def test_a_run_that_was_broken_off_proves_nothing(spec: BackendSpec) -> None:
    write(spec, complete=False)
    assert standings(spec) == [DECLARED, DECLARED]
    (trouble,) = read_reports(spec)[1]
    assert "board.json is of a run that was broken off: run anycore conformance echo again" in trouble


def test_a_report_is_there_while_cases_run_and_says_that_it_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conformance, "EVERY", 0.0)
    path = tmp_path / "report.json"
    seen: list[dict[str, Any]] = []

    def cut_off(backend: str, tally: conformance.Tally, processes: int) -> int:
        seen.append(json.loads(path.read_text()))
        case = pytest.TestReport("suite.py::test_case", ("", 0, ""), {}, "passed", None, "call")
        tally.pytest_runtest_logreport(case)
        seen.append(json.loads(path.read_text()))
        return 2  # as pytest does when interrupted

    monkeypatch.setattr(conformance, "collect", cut_off)
    assert main(["conformance", "cpu", "--report", str(path)]) == 1
    assert [report["conformance"]["passed"] for report in seen] == [0, 1]
    last = json.loads(path.read_text())
    assert not any(report["complete"] for report in (*seen, last))
    assert last["conformance"]["passed"] == 1
    assert "of a run that was broken off written to" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {"report.json"}
    assert not list((tmp_path / "cache").glob("evidence/*"))  # what this machine had proven before stays


def test_conformance_writes_what_the_matrix_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a kit of one test in place of the whole, which takes minutes."""
    monkeypatch.setenv("ANYCORE_CACHE", str(own_cache(tmp_path / "cache")))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", KIT["PYTEST_DISABLE_PLUGIN_AUTOLOAD"])
    from anycore.contract.suite import TestBackend

    kept = ("test_gated", "test_declares_itself_soundly")
    for name in [name for name in dir(TestBackend) if name.startswith("test_") and name not in kept]:
        monkeypatch.setattr(TestBackend, name, None)
    assert main(["conformance", "cpu", "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"]
    assert report["conformance"]["passed"] > 4
    worst = report["conformance"]["worst_error"]["float32"]
    assert 0 < worst["absolute"] < 1e-3
    assert 0 < worst["of_allowed"] <= 1
    assert report["kit"] == evidence.kit_hash()
    capsys.readouterr()
    assert main(["matrix", "--backend", "cpu", "--json"]) == 0
    (backend,) = json.loads(capsys.readouterr().out)["backends"]
    assert f"proven on {report['device']}, {report['date']}" in {row["evidence"] for row in backend["support"]}
