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
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "built"
"""Where wheels carry libraries."""

VARIABLE = "ANYCORE_CPU_KERNELS"


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set that kernels are compiled for."""

    name: str
    machine: str  # as `platform.machine` says it; "": any
    needs: frozenset[str]  # processor flags; none: runs everywhere, and is taken only when asked for
    base: str = ""  # the architecture that compilers know
    features: tuple[str, ...] = ()  # beyond it

    def runs(self, flags: frozenset[str]) -> bool:
        return self.needs <= flags

    def arguments(self, zig: bool) -> tuple[str, ...]:
        """Of the compiler. Zig writes what GCC and Clang call -march in its own way."""
        if not self.base:
            return ()
        if zig:
            return ("-mcpu=" + "+".join((ZIG_NAMES[self.base], *self.features)),)
        if self.machine == "aarch64":
            return ("-march=" + "+".join((self.base, *self.features)),)
        return (f"-march={self.base}", *(f"-m{feature.replace('_', '-')}" for feature in self.features))


AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VNNI = AVX512 | {"avx512_vnni"}
BF16 = VNNI | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
NEON = frozenset({"asimd", "asimddp"})
NEON_BF16 = NEON | {"bf16", "i8mm"}

X86, ARM = "x86_64", "aarch64"
DOTS = ("avx512vnni", "avx512bf16")
LEVELS = (
    Level("amx", X86, AMX, "x86-64-v4", (*DOTS, "amx_tile", "amx_bf16", "amx_int8")),
    Level("avx512-bf16", X86, BF16, "x86-64-v4", DOTS),
    Level("avx512-vnni", X86, VNNI, "x86-64-v4", DOTS[:1]),
    Level("avx512", X86, AVX512, "x86-64-v4"),
    Level("avx2-vnni", X86, AVX2 | {"avx_vnni"}, "x86-64-v3", ("avxvnni",)),
    Level("avx2", X86, AVX2, "x86-64-v3"),
    Level("neon-bf16", ARM, NEON_BF16, "armv8.2-a", ("dotprod", "bf16", "i8mm")),
    Level("neon", ARM, NEON, "armv8.2-a", ("dotprod",)),
    Level("generic", "", frozenset()),
)
"""Best first. Other processors have no level of their own: plain torch was made for them, this was not."""

ZIG_NAMES = {"x86-64-v4": "x86_64_v4", "x86-64-v3": "x86_64_v3", "armv8.2-a": "generic+v8_2a"}

ARGUMENTS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti")
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
    raise NoKernels(f"made for x86 with AVX2 and ARM with dot products, not for this {platform.machine()}")


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


@cache
def digest(level: Level) -> str:
    """A name for the state of the sources, and for what compilers are told of them. A plan asks dozens of times."""
    found = hashlib.sha256(" ".join((*ARGUMENTS, *level.arguments(zig=False))).encode())
    for path in (*sources(), *sorted(HERE.glob("*.hpp"))):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Compiler:
    """How C++ is compiled and linked here."""

    program: tuple[str, ...]
    zig: bool = False
    target: str = ""  # what zig compiles for; "": this machine

    def __str__(self) -> str:
        return "ziglang" if self.zig else self.program[0]

    def compiles(self, level: Level) -> tuple[str, ...]:
        return (*self._called("c++"), *ARGUMENTS, *level.arguments(self.zig))

    def links(self) -> tuple[str, ...]:
        """As if it were C: the kernels need nothing of a C++ runtime, and zig would compile a whole one."""
        return (*self._called("cc"), "-shared", "-pthread", "-s")

    def _called(self, language: str) -> tuple[str, ...]:
        if not self.zig:
            return self.program
        return (*self.program, language, *(("-target", self.target) if self.target else ()))


NO_COMPILER = "no C++ compiler found (install g++ or the package ziglang, or set CXX)"


def compiler(environ: Mapping[str, str] = os.environ) -> Compiler | None:
    """CXX, else the system's C++ compiler, else the one that the package ziglang is."""
    if asked := environ.get("CXX"):
        program = shutil.which(asked)
        return Compiler((program,)) if program else None
    program = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    return Compiler((program,)) if program else zig()


def zig(target: str = "") -> Compiler | None:
    """The compiler of the package ziglang, where that is installed."""
    return Compiler((sys.executable, "-m", "ziglang"), zig=True, target=target) if find_spec("ziglang") else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's compiled libraries are kept."""
    return Path(environ.get("ANYCORE_CACHE") or Path.home() / ".cache" / "anycore") / "kernels"


def library_name(level: Level) -> str:
    return f"{level.name}-{digest(level)}.so"


def find(level: Level) -> Path | None:
    """The library, if the wheel carries it or an earlier process compiled it."""
    places = (BUILT / library_name(level), cache_folder() / library_name(level))
    return next((path for path in places if path.exists()), None)


def compile_library(level: Level, folder: Path, using: Compiler | None = None) -> Path:
    """Compile a level's library into `folder`: its files side by side, a few seconds.

    Raises:
        NoKernels: there is no compiler, or it failed; with the end of what it said.
    """
    using = using or compiler()
    if using is None:
        raise NoKernels(NO_COMPILER)
    path = folder / library_name(level)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{path.name}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as drafts:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that start together one compiles, the others wait
            if not path.exists():
                compile_into(level, Path(drafts), using).replace(path)
                failure(path).unlink(missing_ok=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"could not compile level {level.name} into {folder}: {error}") from error
    except NoKernels as error:
        failure(path).write_text(f"{using}\n{error}", encoding="utf-8")
        raise
    return path


def compile_into(level: Level, folder: Path, using: Compiler) -> Path:
    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        run(*using.compiles(level), "-c", str(source), "-o", made)
        return made

    with ThreadPoolExecutor() as files:
        made = list(files.map(compiled, sources()))
    path = folder / "library.so"
    run(*using.links(), *made, "-lm", "-o", str(path))
    return path


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise NoKernels(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def failure(library: Path) -> Path:
    """Where it is kept what a compiler said that could not make this library."""
    return library.with_name(f"{library.name}.failed")


def known_failure(level: Level, using: Compiler) -> str:
    """What this compiler said when it failed at these sources; empty if it was not tried, or did not fail."""
    try:
        name, _, said = failure(cache_folder() / library_name(level)).read_text(encoding="utf-8").partition("\n")
    except OSError:
        return ""
    return said if name == str(using) else ""


def outlook(flags: frozenset[str]) -> tuple[Level, Compiler | None]:
    """The level that will compute, and who has yet to compile it; what can be told without compiling.

    Raises:
        NoKernels: plain torch will compute.
        ValueError: as `choose`.
    """
    level = choose(flags)
    if find(level) is not None:
        return level, None
    using = compiler()
    if using is None:
        raise NoKernels(NO_COMPILER)
    if said := known_failure(level, using):
        raise NoKernels(said)
    return level, using


def available(flags: frozenset[str]) -> bool:
    """Whether kernels will compute."""
    try:
        outlook(flags)
    except (NoKernels, ValueError):
        return False
    return True


def describe(flags: frozenset[str]) -> str:
    """What `anycore doctor` says."""
    try:
        level, using = outlook(flags)
    except (NoKernels, ValueError) as error:
        return f"none, plain torch: {error}"
    return level.name if using is None else f"{level.name}, to be compiled by {using} on first use"
