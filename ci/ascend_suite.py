"""The Ascend tests without an NPU, from nothing: `python ci/ascend_suite.py [pytest's arguments]`.

Makes a virtual environment for them in build/ascend, because torch_npu must not be beside the other tests; installs the
unmodified torch_npu wheel there, compiles the stand-in libraries, runs tests/ascend and prints what each task called.
Fails where it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "ascend"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
TORCH_NPU = "2.13.0"
"""The release whose torch is the one in constraints.txt."""

sys.path.insert(0, str(TESTS))  # the rig, whose files for building import neither torch nor torch_npu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "ascend", help="where everything is made")
    parser.add_argument("--shell", action="store_true", help="no tests: a shell on the machine with the stand-in NPU")
    options, rest = parser.parse_known_args()
    folder = options.folder.resolve()
    python = environment(folder / "venv")
    libraries = build(python, folder / "libraries")
    with tempfile.TemporaryDirectory() as scratch:
        environ = machine(Path(scratch), libraries)
        environ["PATH"] = f"{python.parent}{os.pathsep}{environ['PATH']}"
        if options.shell:
            return subprocess.run([environ.get("SHELL", "/bin/sh")], env=environ, check=False).returncode
        code = test(python, rest, environ)
        if not rest:
            silent = report(Path(environ["STANDIN_COUNTS"]))
            code = code or silent
    return code


def environment(folder: Path) -> Path:
    """A virtual environment with the project, its test packages and torch_npu; returns its interpreter."""
    python = folder / "bin" / "python"
    lent = site_packages()
    made_of = f"torch-npu {TORCH_NPU}, {sys.version}, {ROOT}, {lent}\n"
    note = folder / "made-of.txt"
    if note.exists() and note.read_text() == made_of:
        return python
    say(f"making {folder}")
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if lent is None:
        run([*pip, "-c", str(CONSTRAINTS), "-e", f"{ROOT}[dev]"])
    run([*pip, "--no-deps", f"torch-npu=={TORCH_NPU}"])
    run([*pip, "--no-deps", "-e", str(ROOT)])
    lines = [f"import sys; sys.path.append({str(TESTS)!r}); import rig.onimport"]
    if lent is not None:
        lines.insert(0, f"import site; site.addsitedir({str(lent)!r})")
    own = run_for_text([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    Path(own, "ascend_rig.pth").write_text("\n".join(lines) + "\n")
    note.write_text(made_of)
    return python


def site_packages() -> Path | None:
    """Packages of the interpreter that runs this, if it has what the tests need: copies of torch are large."""
    try:
        for package in ("anycore", "pytest", "pytest-timeout", "pytest-xdist", "transformers", "httpx"):
            metadata.version(package)
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    return Path(str(torch.locate_file(""))) if torch.version.split("+")[0] == TORCH_NPU else None


def build(python: Path, folder: Path) -> Path:
    """The stand-in libraries; built again each time, which takes two seconds."""
    from rig.build import build as compile_all

    found = run_for_text(
        [str(python), "-c", "import importlib.util as u; print(u.find_spec('torch_npu').submodule_search_locations[0])"]
    )
    say("compiling the stand-in libraries")
    compile_all(Path(found), folder)
    return folder


def machine(folder: Path, libraries: Path) -> dict[str, str]:
    """The environment of a process on the default machine: one 910B3."""
    from rig.machine import A2

    environ = A2.write(folder / "machine", libraries)
    counts = folder / "counts"
    counts.mkdir()
    more = {"STANDIN_LIBRARIES": str(libraries), "STANDIN_COUNTS": str(counts), "OMP_NUM_THREADS": "1"}
    return environ | more


def test(python: Path, rest: list[str], environ: dict[str, str]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    named = any(not word.startswith("-") for word in rest)
    arguments = rest if rest else ["-n", str(cores), "--durations=10"]
    command = [str(python), "-m", "pytest", *arguments, *([] if named else [str(TESTS)])]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


def report(folder: Path) -> int:
    """Print what each task called, and fail if one called nothing."""
    counts: dict[str, Counter[str]] = {task: Counter() for task in ("generate", "embed", "rerank")}
    for file in folder.glob("*.json"):
        for task, calls in json.loads(file.read_text()).items():
            counts[task].update(calls)
    names = sorted(set().union(*counts.values()))
    width = max(map(len, names), default=8)
    print(f"\n{'calls of torch_npu':<{width}} " + " ".join(f"{task:>10}" for task in counts))
    for name in names:
        print(f"{name:<{width}} " + " ".join(f"{calls[name]:>10}" for calls in counts.values()))
    silent = [task for task, calls in counts.items() if not calls]
    if silent:
        say(f"nothing was called for {', '.join(silent)}")
    return 1 if silent else 0


def say(text: str) -> None:
    print(f"ascend_suite: {text}", flush=True)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})


def run_for_text(command: list[str]) -> str:
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
