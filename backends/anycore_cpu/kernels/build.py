"""Which library of kernels fits this processor, and how it is compiled. No torch here, and nothing of anycore: the hook
that builds wheels runs this file by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "built"
"""Where wheels carry libraries."""

VARIABLE = "ANYCORE_CPU_KERNELS"


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set that kernels are compiled for."""

    name: str
    needs: frozenset[str]  # processor flags; none: runs everywhere, and is taken only when asked for
    arguments: tuple[str, ...]  # of the compiler

    def runs(self, flags: frozenset[str]) -> bool:
        return self.needs <= flags


AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}

LEVELS = (
    Level("amx", AMX, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Level("avx512-bf16", BF16, ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    Level("avx512", AVX512, ("-march=x86-64-v4",)),
    Level("avx2", AVX2, ("-march=x86-64-v3",)),
    Level("generic", frozenset(), ()),
)
"""Best first. Other processors than x86 have no level of their own yet: plain torch was made for them, this was not."""

ARGUMENTS = ("-O3", "-std=c++17", "-fPIC", "-pthread")
SECONDS = 300  # that a compiler may take


class NoKernels(Exception):
    """There is no library for this machine; says why."""


def choose(flags: frozenset[str], environ: Mapping[str, str] = os.environ) -> Level:
    """The best level this processor runs, or the one that the environment names.

    Raises:
        NoKernels: there is none, or they are switched off.
        ValueError: the environment names what there is not, or what this processor cannot run.
    """
    asked = environ.get(VARIABLE, "")
    if asked == "none":
        raise NoKernels(f"switched off by {VARIABLE}")
    if asked:
        level = next((level for level in LEVELS if level.name == asked), None)
        if level is None:
            names = ", ".join(level.name for level in LEVELS)
            raise ValueError(f"{VARIABLE}={asked} is not one of {names}, none")
        if missing := sorted(level.needs - flags):
            raise ValueError(f"{VARIABLE}={asked}: this processor lacks {', '.join(missing)}")
        return level
    for level in LEVELS:
        if level.needs and level.runs(flags):
            return level
    raise NoKernels(f"made for x86 with AVX2, this is {platform.machine() or 'another processor'}")


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


def digest() -> str:
    """A name for the state of the sources."""
    found = hashlib.sha256(" ".join(ARGUMENTS).encode())
    for path in (*sources(), *sorted(HERE.glob("*.hpp"))):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler: CXX, else the system's."""
    names = (environ["CXX"],) if environ.get("CXX") else ("c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's compiled libraries are kept."""
    return Path(environ.get("ANYCORE_CACHE") or Path.home() / ".cache" / "anycore") / "kernels"


def library_name(level: Level) -> str:
    return f"{level.name}-{digest()}.so"


def find(level: Level) -> Path | None:
    """The library, if the wheel carries it or an earlier process compiled it."""
    places = (BUILT / library_name(level), cache_folder() / library_name(level))
    return next((path for path in places if path.exists()), None)


def compile_library(level: Level, folder: Path) -> Path:
    """Compile a level's library into `folder`: its files side by side, a few seconds.

    Raises:
        NoKernels: there is no compiler, or it failed; with the end of what it said.
    """
    program = compiler()
    if program is None:
        raise NoKernels("no C++ compiler found (install g++, or set CXX)")
    path = folder / library_name(level)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            (folder / f"{path.name}.lock").open("w") as lock,
            tempfile.TemporaryDirectory(dir=folder) as name,
            ThreadPoolExecutor() as files,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one compiles, the others wait
            if path.exists():
                return path
            drafts = Path(name)

            def compiled(source: Path) -> str:
                made = str(drafts / f"{source.stem}.o")
                run(program, *ARGUMENTS, *level.arguments, "-c", str(source), "-o", made)
                return made

            run(program, "-shared", "-pthread", *files.map(compiled, sources()), "-o", str(drafts / path.name))
            (drafts / path.name).replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"could not compile level {level.name} into {folder}: {error}") from error
    return path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise NoKernels(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def available(flags: frozenset[str]) -> bool:
    """Whether kernels will compute, as far as can be told without compiling them."""
    try:
        return find(choose(flags)) is not None or compiler() is not None
    except (NoKernels, ValueError):
        return False


def describe(flags: frozenset[str]) -> str:
    """What `anycore doctor` says; compiles nothing."""
    try:
        level = choose(flags)
    except (NoKernels, ValueError) as error:
        return f"none, plain torch: {error}"
    if find(level) is not None:
        return level.name
    program = compiler()
    if program is None:
        return "none, plain torch: no C++ compiler found (install g++, or set CXX)"
    return f"{level.name}, to be compiled by {program} on first use"
