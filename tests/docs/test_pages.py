"""The documentation against the program: what there is is mentioned, and what is mentioned is there."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import PAGES, ROOT, everything, generator, prose, shell_lines

from anycore import hookspecs
from anycore.cli.main import COMMANDS, parser_of
from anycore.config import ENVIRONMENT, ServerConfig
from anycore.contract.batch import Batch
from anycore.contract.declare import BackendSpec, Level, Task
from anycore.engine.scheduler import POLICIES
from anycore.models.families import ARCHITECTURES
from anycore.models.rope import KINDS
from anycore.server.app import create_app
from anycore.server.phases import Phase
from anycore.server.series import TABLE

DOCS = everything()
TOOLS = {"pip", "pytest", "curl", "python3", "source", "pre-commit"}  # what commands in the pages may begin with


def program_flags() -> set[str]:
    """Every spelling of every flag of every command."""
    parsers = [parser_of(name) for name in COMMANDS if name != "version"]
    return {spelling for parser in parsers for spelling in parser._option_string_actions if spelling.startswith("--")}


def test_generated_parts_are_fresh() -> None:
    module = generator()
    stale = [page.name for page in module.pages() if module.fresh(page) != page.read_text(encoding="utf-8")]
    assert not stale, "run ci/generate_docs.py"


def test_a_stale_part_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin environment -->\n| old |\n<!-- end environment -->\nafter\n")
    fresh = generator().fresh(page)
    assert "| old |" not in fresh
    assert "ANYCORE_CACHE" in fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("after\n")


def test_every_part_is_used_and_closed() -> None:
    for name in generator().PARTS:
        assert DOCS.count(f"<!-- begin {name} -->") >= 1, f"no page has the part {name}"
    assert DOCS.count("<!-- begin ") == DOCS.count("<!-- end ")


def test_every_command_and_flag_is_mentioned() -> None:
    for name in COMMANDS:
        assert f"anycore {name}" in DOCS
    missing = {flag for flag in program_flags() - {"--help"} if not re.search(rf"`{flag}[`= ]", DOCS)}
    assert not missing


def test_every_flag_that_is_mentioned_exists() -> None:
    known = program_flags()
    for page in PAGES:
        for flag in re.findall(r"`(--[a-z][a-z-]*)", prose(page)):
            assert flag in known or flag in ("--check", "--fix"), f"{page.name}: there is no flag {flag}"


@pytest.mark.parametrize(("page", "line"), shell_lines(), ids=str)
def test_commands_in_the_pages_can_be_typed(page: Path, line: str) -> None:
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)] if line.count("'") % 2 == 0 else []
    if "anycore" in words and words[0] == "anycore":
        length = 3 if " ".join(words[1:3]) in COMMANDS else 2
        name = " ".join(words[1:length])
        assert name in COMMANDS
        if name != "version":
            parser_of(name).read(words[length:])
    elif words and words[0].startswith("ci/"):
        assert (ROOT / words[0]).stat().st_mode & 0o111
    elif line[:1].isalpha():
        assert words == [] or words[0] in TOOLS


def test_environment_is_complete() -> None:
    read = set()
    for path in (ROOT / "framework").rglob("*.py"):
        read |= set(re.findall(r'"((?:ANYCORE|HF)_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    assert read == set(ENVIRONMENT), "config.ENVIRONMENT lists what is read"
    assert all(f"`{name}`" in DOCS for name in ENVIRONMENT)


def test_every_hook_is_shown_with_its_arguments() -> None:
    hooks = [item for item in inspect.getmembers(hookspecs, inspect.isfunction) if hasattr(item[1], "anycore_spec")]
    assert len(hooks) >= 3
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    for name, function in hooks:
        arguments = ", ".join(f"{p.name}: {p.annotation}" for p in inspect.signature(function).parameters.values())
        assert f"def {name}({arguments})" in page


def test_every_series_is_mentioned() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{series.exposed}`" in page for series in TABLE.values())


def test_every_route_and_phase_is_mentioned() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for path in create_app(ServerConfig(), []).openapi()["paths"]:
        assert f"`{path}`" in page
    for phase in Phase:
        assert f"`{phase.value}`" in page


def test_every_word_of_the_program_is_explained() -> None:
    words = [*(task.value for task in Task), *POLICIES, *ARCHITECTURES, *KINDS]
    assert not [word for word in words if f"`{word}`" not in DOCS]
    assert not [level.value for level in Level if f"**{level.value}**" not in DOCS]
    backend = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
    assert not [name for name in BackendSpec.__slots__ if f"`{name}`" not in backend]
    assert not [name for name in ("query_lens", "context_lens", "decode_only") if name not in dir_of(Batch)]


def dir_of(owner: type) -> set[str]:
    return {*dir(owner), *inspect.get_annotations(owner)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|txt|toml|md))`", text):
        places = (ROOT, ROOT / "framework" / "anycore", ROOT / "tests" / "engine")
        planned = "**Plan.**" in text or "files.txt" in name or name.startswith(("1_Pooling", "2_Dense"))
        assert planned or any((place / name).exists() for place in places), f"{page.name} names {name}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_map_of_the_rooms_is_complete() -> None:
    tour = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    core = ROOT / "framework" / "anycore"
    names = {path.relative_to(core).parts[0] for path in core.rglob("*.py")} - {"__init__.py"}
    assert not [name for name in names if name not in tour]


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "life of a request" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_the_test_command_is_the_same_everywhere() -> None:
    install = "pip install -c ci/constraints.txt -e '.[dev]'"
    assert f"{install} && pytest" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert install in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert install in re.sub(r"pip install -q", "pip install", run)
    assert re.search(r"^pytest\b", run, re.MULTILINE)


def test_constraints_pin_everything_the_tests_import() -> None:
    """Every dependency of ours has a pin, and the pins satisfy our ranges."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = [Requirement(line) for line in lines]
    assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in pins)
    optional = ("cuda", "ascend", "onnx", "modelscope", "ray")
    for wanted in map(Requirement, requires("anycore") or ()):
        if wanted.name == "anycore" or any(f'"{extra}"' in str(wanted.marker) for extra in optional):
            continue
        found = [pin for pin in pins if canonicalize_name(pin.name) == canonicalize_name(wanted.name)]
        assert found, f"ci/constraints.txt has no pin for {wanted.name}"
        for pin in found:
            assert wanted.specifier.contains(str(pin.specifier).removeprefix("=="))
