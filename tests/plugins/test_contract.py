"""Contract versions: an old plugin goes on working, a newer one is refused with what to do about it."""

from __future__ import annotations

import ast
import json
import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from installed import anycore, install, own_cache

from anycore import __version__, plugins
from anycore.contract.declare import CONTRACT_VERSION

OLD = Path(__file__).parent / "data" / "contract_1_0"
OURS = ".".join(map(str, CONTRACT_VERSION))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_plugin_of_contract_1_0_passes_the_kit_of_today(tmp_path: Path) -> None:
    """Its code stands as it was written; only what the kit asks of later contracts is skipped."""
    (tmp_path / "old_device").symlink_to(OLD / "old_device")
    install(tmp_path, "old-device", "1.0", "old", "old_device")
    report = tmp_path / "report.json"
    words = ["conformance", "old", "--quick", "--report", str(report)]
    done = anycore(*words, path=tmp_path, env={"ANYCORE_CACHE": str(own_cache(tmp_path / "cache"))})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    counts = json.loads(report.read_text())["conformance"]
    assert counts["failed"] == 0
    assert counts["passed"] > 40
    products, tasks = 4, 4  # with quantised weights, which it is never given, and in schemes, of which it claims none
    caches, ranks = 4, 1  # rounded ones and several devices, of which it claims none either
    assert counts["skipped"] == products + tasks + caches + ranks


def test_the_old_plugin_names_nothing_that_1_0_did_not_have() -> None:
    """What it imports is the list that 1.0 began with: nobody has modernised it."""
    found = set()
    for path in sorted((OLD / "old_device").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("anycore"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    declared = {"BackendSpec", "Device", "Level", "Probe", "Support", "Task"}
    assert found == {
        "anycore.hookimpl",
        "anycore.contract.backend.Backend",
        "anycore.contract.backend.Memory",
        "anycore.contract.ops.Ops",
        "anycore.errors.PluginError",
        *(f"anycore.contract.declare.{name}" for name in declared),
    }


NEWER = {
    "a module": ("import anycore.contract.shards", "No module named 'anycore.contract.shards'"),
    "a name": ("from anycore.contract.declare import Lease", "cannot import name 'Lease'"),
    "a field": (
        "from anycore.contract.declare import Support, Level\n"
        "Support(tasks=(), attention='causal', weights=(), level=Level.NATIVE, experts=8)",
        "unexpected keyword argument 'experts'",
    ),
}


@pytest.mark.parametrize("what", NEWER)
def test_h03_what_the_contract_does_not_have_is_told_in_versions(site: Path, what: str) -> None:
    code, words = NEWER[what]
    install(site, "newer-device", "4.2", "newer", f"newer_{what.replace(' ', '_')}", code)
    (failure,) = plugins.load(environ={}).failures
    assert words in failure.reason
    advice = (
        f"anycore {__version__} has contract {OURS}, which has no such thing: upgrade anycore, or install a version"
    )
    assert failure.advice == f"{advice} of newer-device for this contract."


def test_a_fault_of_its_own_is_not_called_too_new(site: Path) -> None:
    install(site, "broken-device", "1.0", "broken", "broken_by_itself", "import no_such_library")
    (failure,) = plugins.load(environ={}).failures
    assert failure.advice == "Repair or upgrade broken-device, or leave it out with ANYCORE_PLUGINS."


HOOK = """
from anycore import hookimpl
from anycore.contract.declare import BackendSpec
@hookimpl
def register_backends():
    return [BackendSpec("odd", (2, 0), (), probe=None, open=None)]
"""


def test_the_messages_of_the_page_are_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
    shown = re.findall(r"^plugin odd .*$", page, re.MULTILINE)
    assert len(shown) == 2
    for number, code in enumerate((HOOK, NEWER["a field"][0])):
        folder = install(tmp_path / str(number), "odd-device", "3.1", "odd", f"odd_{number}", code)
        monkeypatch.syspath_prepend(folder)
        entries = [entry for found in distributions(path=[str(folder)]) for entry in found.entry_points]
        (failure,) = plugins.load(entries, environ={}).failures
        assert str(failure) == shown[number]
