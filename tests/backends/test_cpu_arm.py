"""A wheel for ARM, built on any machine: which instructions its kernels are made of, and, where an emulator and a cross
compiler are installed (Debian: qemu-user, g++-aarch64-linux-gnu), that they compute right.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anycore_cpu.kernels import build

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "ci" / "cpu"
INSTRUCTIONS = {
    "neon": ({"fmla", "sdot"}, {"bfdot", "bfcvtn", "smmla"}),
    "neon-bf16": ({"fmla", "sdot", "bfdot", "bfcvtn"}, set()),
}
"""What a level is made of, and what processors that it is for do not have."""

EMULATED = {"neon": "cortex-a76", "neon-bf16": "max"}
"""Processors of each level that qemu knows."""


@pytest.mark.slow
def test_a_wheel_for_arm_has_the_instructions_of_its_levels_and_computes_right(tmp_path: Path) -> None:
    capstone = pytest.importorskip("capstone")
    pytest.importorskip("ziglang")
    libraries = wheel_libraries(tmp_path)
    assert libraries.keys() == INSTRUCTIONS.keys()
    for name, path in libraries.items():
        found = instructions(path.read_bytes(), capstone.Cs(capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM))
        wanted, foreign = INSTRUCTIONS[name]
        assert wanted <= found.keys(), f"{name} lacks {wanted - found.keys()}"
        assert not foreign & found.keys(), f"{name} has {foreign & found.keys()}"
    emulator, compiler = shutil.which("qemu-aarch64"), shutil.which("aarch64-linux-gnu-g++")
    if emulator is None or compiler is None:
        pytest.skip("instructions are right; to run them needs qemu-user and g++-aarch64-linux-gnu")
    for name, path in libraries.items():
        program = tmp_path / name
        sources = [str(CHECKS / f"{source}.cpp") for source in ("selftest", "attention_case")]
        paths = (f"-I{build.HERE}", f"-I{CHECKS}", f"-Wl,-rpath,{path.parent}")
        build.run(compiler, "-O1", "-std=c++17", "-pthread", *paths, *sources, str(path), "-o", str(program))
        command = (emulator, "-cpu", EMULATED[name], "-L", "/usr/aarch64-linux-gnu", str(program), "1", "8", "2")
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        assert "numbers are right" in done.stdout


def wheel_libraries(folder: Path) -> dict[str, Path]:
    """The libraries of a wheel for aarch64, by their level."""
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ANYCORE_WHEEL_MACHINE": "aarch64"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_28_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        paths = [Path(archive.extract(name, folder)) for name in names]
    assert {path.parent.relative_to(folder).as_posix() for path in paths} == {"anycore_cpu/kernels/built"}
    return {path.name.rsplit("-", 1)[0]: path for path in paths}


def instructions(data: bytes, reader: Any) -> Counter[str]:
    """How often each instruction is in the code of an ELF file."""
    headers, size, count = (int.from_bytes(data[at : at + n], "little") for at, n in ((0x20, 8), (0x36, 2), (0x38, 2)))
    reader.skipdata = True
    found: Counter[str] = Counter()
    for header in range(headers, headers + size * count, size):
        kind, flags, offset, _, _, length = (
            int.from_bytes(data[header + at : header + at + n], "little")
            for at, n in ((0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8))
        )
        if kind == 1 and flags & 1:  # loaded, to be run
            found.update(name for _, _, name, _ in reader.disasm_lite(data[offset : offset + length], 0))
    return found
