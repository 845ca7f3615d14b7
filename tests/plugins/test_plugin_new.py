"""`anycore plugin new`: what it writes installs, serves and passes the kit as it stands."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from installed import KIT, own_cache

from anycore.cli import plugin_new
from anycore.cli.main import main
from anycore.contract.declare import CONTRACT_VERSION


def create(folder: Path, name: str) -> Path:
    assert main(["plugin", "new", name, "--dir", str(folder)]) == 0
    return folder / f"anycore-{name.replace('_', '-')}"


def test_the_project_is_small_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = create(tmp_path, "my-chip_2")
    files = {str(path.relative_to(project)): path.read_text() for path in sorted(project.rglob("*")) if path.is_file()}
    package = "anycore_my_chip_2"
    assert list(files) == [
        "README.md",
        f"{package}/__init__.py",
        f"{package}/device.py",
        "pyproject.toml",
        "tests/test_conformance.py",
    ]
    assert not [name for name, text in files.items() if re.search(r"\$\w|\$\{", text)], "an open place is left"
    assert f'[project.entry-points.anycore]\nmy-chip_2 = "{package}"\n' in files["pyproject.toml"]
    code = [line for name, text in files.items() if name.startswith(package) for line in statements(text)]
    assert len(code) <= 50
    assert f"api={CONTRACT_VERSION}" in files[f"{package}/__init__.py"]
    printed = capsys.readouterr().out
    assert all(str(project / name) in printed for name in files)


def statements(text: str) -> list[str]:
    """Lines that are neither empty, nor remarks, nor docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).replace("\n\n", "\n").strip().splitlines()


@pytest.mark.parametrize("name", ["auto", "Chip", "a chip", "../chip", "9lives", "chip-", ""])
def test_a_name_that_would_be_refused_later_is_refused_now(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugin", "new", name, "--dir", str(tmp_path)]) != 0
    assert "cannot be the name of a backend" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused_with_its_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "cpu", "--dir", str(tmp_path)]) != 0
    assert "cpu is the name of a backend already (anycore " in capsys.readouterr().err


def test_what_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = create(tmp_path, "chip")
    (project / "README.md").write_text("mine")
    assert main(["plugin", "new", "chip", "--dir", str(tmp_path)]) != 0
    assert "is there already" in capsys.readouterr().err
    assert (project / "README.md").read_text() == "mine"


def test_every_template_is_packaged() -> None:
    """They lie inside the package, whose folder goes into the wheel as it is."""
    assert plugin_new.TEMPLATES.is_relative_to(Path(plugin_new.__file__).parent)
    assert len(list(plugin_new.TEMPLATES.rglob("*.template"))) == 5


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a new environment that sees the packages of this one, with a project installed in it."""
    folder = tmp_path_factory.mktemp("fresh")
    project = create(folder, "acme")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Packages of the environment that runs the tests are seen, but nothing is written there.
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = run([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(project)])
    assert done.returncode == 0, done.stderr
    return python


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("ANYCORE_", "PYTHONPATH"))}
    clean["ANYCORE_CACHE"] = os.environ["ANYCORE_CACHE"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**clean, "OMP_NUM_THREADS": "1", **KIT, **variables},
    )


@pytest.mark.slow
def test_installed_in_a_new_environment_it_passes_the_kit(environment: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["conformance", "acme", "--quick", "--report", str(report)]
    done = run([str(environment), "-m", "anycore.cli.main", *words], ANYCORE_CACHE=str(own_cache(tmp_path / "cache")))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    counts = json.loads(report.read_text())["conformance"]
    assert counts["failed"] == 0
    assert counts["passed"] > 40


@pytest.mark.slow
def test_installed_in_a_new_environment_it_serves(environment: Path, t_lm: Path) -> None:
    words = ["generate", str(t_lm), "Paris", "--backend", "acme", "--dtype", "float32", "--max-model-len", "64"]
    done = run([str(environment), "-m", "anycore.cli.main", *words, "--max-tokens", "3"])
    assert done.returncode == 0, done.stderr
    listed = run([str(environment), "-m", "anycore.cli.main", "matrix"])
    assert "acme (anycore-acme 0.1.0): device 0, Acme 0, chip acme" in listed.stdout
    assert "acme" not in entry_points(group="anycore").names, "it was installed where the tests run"
