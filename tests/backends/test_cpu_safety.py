"""The CPU kernels under sanitizers and valgrind, on shapes by chance: no byte beside their memory, no race, no wrong
result. The programs are ci/cpu's; they hold every number to its definition.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anycore_cpu.kernels import build
from anycore_cpu.probe import processor_flags

CHECKS = Path(__file__).parents[2] / "ci" / "cpu"
FUZZ_SECONDS = os.environ.get("ANYCORE_FUZZ_SECONDS", "4")


PROGRAMS = ("selftest", "fuzz_attention")
QUICK = "-Og"
"""How what is watched is compiled: it runs nearly as fast as with -O1, which takes compilers half as long again."""


def programs(folder: Path, level: str, *flags: str, names: tuple[str, ...] = PROGRAMS) -> Path:
    """Compile programs with a level's kernels in them; skips where this cannot be done."""
    chosen = next(one for one in build.LEVELS if one.name == level)
    using = build.compiler()
    if using is None or using.zig:
        pytest.skip("needs the system's C++ compiler")
    command = (*using.program, "-std=c++17", "-pthread", "-g1", *chosen.arguments(zig=False), *flags)
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    try:
        build.run(*command, str(empty), "-o", str(folder / "empty"))
        build.run(str(folder / "empty"))
    except build.NoKernels as error:
        pytest.skip(f"no programs with {' '.join(flags)} here: {error}")

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        build.run(*command, f"-I{build.HERE}", f"-I{CHECKS}", "-c", str(source), "-o", made)
        return made

    shared = [path for path in CHECKS.glob("*.cpp") if path.stem not in PROGRAMS]
    with ThreadPoolExecutor(2) as files:
        objects = list(files.map(compiled, (*build.sources(), *shared, *(CHECKS / f"{name}.cpp" for name in names))))
    for name, program in zip(names, objects[-len(names) :], strict=True):
        build.run(*command, *objects[: -len(names)], program, "-o", str(folder / name))
    return folder


def library(level: str) -> Path:
    """A level's kernels as users have them."""
    chosen = next(one for one in build.LEVELS if one.name == level)
    return build.find(chosen) or build.compile_library(chosen, build.cache_folder())


def beside(kernels: Path, program: Path) -> Path:
    """Compile the selftest to run with kernels that stand elsewhere."""
    using = build.compiler()
    if using is None or using.zig:
        pytest.skip("needs the system's C++ compiler")
    sources = [str(CHECKS / f"{name}.cpp") for name in ("selftest", "attention_case")]
    paths = (f"-I{build.HERE}", f"-I{CHECKS}", f"-Wl,-rpath,{kernels.parent}")
    flags = (QUICK, "-g1", "-std=c++17", "-pthread")
    build.run(*using.program, *flags, *paths, *sources, str(kernels), "-o", str(program))
    return program


def right(*command: str | Path) -> None:
    """Run a program that ends with 0 only if nothing is wrong."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "numbers are right" in done.stdout


def best_level() -> str:
    try:
        return build.choose(processor_flags(), {}).name
    except build.NoKernels:
        return "generic"


@pytest.mark.slow
def test_no_byte_beside_their_memory_and_nothing_undefined(tmp_path: Path) -> None:
    flags = (QUICK, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    made = programs(tmp_path, best_level(), *flags)
    right(made / "selftest", "1", "40", "2")
    right(made / "fuzz_attention", FUZZ_SECONDS, "1")


@pytest.mark.slow
def test_threads_do_not_race(tmp_path: Path) -> None:
    made = programs(tmp_path, "generic", QUICK, "-fsanitize=thread", names=PROGRAMS[:1])
    right(made / "selftest", "2", "15", "4")


@pytest.mark.slow
def test_valgrind_sees_nothing_uninitialised_and_no_leak(tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    level = "avx2" if best_level() not in ("generic", "neon", "neon-bf16") else "generic"  # it knows no AVX-512
    made = beside(library(level), tmp_path / "selftest")
    options = ("-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite")
    right(valgrind, *options, made, "3", "4", "2")
