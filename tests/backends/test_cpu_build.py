"""Which library of the CPU kernels is taken, who compiles it, and what is said where nobody can."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from anycore.errors import ConfigError
from anycore_cpu.kernels import build
from anycore_cpu.kernels.library import Kernels, load_best

KUNPENG_920 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm fcma dcpop asimddp asimdfhm"
)


def test_the_best_level_that_runs_is_taken() -> None:
    assert build.choose(build.AMX, {}).name == "amx"
    assert build.choose(build.BF16, {}).name == "avx512-bf16"
    assert build.choose(build.AVX512, {}).name == "avx512"
    assert build.choose(build.AVX2 | {"avx512f"}, {}).name == "avx2"
    assert build.choose(build.AVX512 | {"avx512_vnni"}, {}).name == "avx512-vnni"
    assert build.choose(build.AVX2 | {"avx_vnni"}, {}).name == "avx2-vnni"
    assert build.choose(frozenset(KUNPENG_920.split()), {}).name == "neon"
    assert build.choose(build.NEON_BF16 | {"sve"}, {}).name == "neon-bf16"
    with pytest.raises(build.NoKernels, match="ARM with dot products"):
        build.choose(frozenset({"asimd"}), {})


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are x86's")
def test_what_is_written_for_tiles_compiles_where_nothing_has_them() -> None:
    """It stands between #if, so no other level's build looks at it."""
    using, level = build.compiler(), build.LEVELS[0]
    if using is None or using.zig:
        pytest.skip("needs the system's C++ compiler")
    assert level.name == "amx"
    build.run(*using.compiles(level), "-fsyntax-only", *map(str, build.sources()))


def test_a_level_can_be_asked_for() -> None:
    assert build.choose(build.AMX, {build.VARIABLE: "avx2"}).name == "avx2"
    assert build.choose(frozenset(), {build.VARIABLE: "generic"}).name == "generic"
    with pytest.raises(build.NoKernels, match="switched off"):
        build.choose(build.AMX, {build.VARIABLE: "none"})
    with pytest.raises(ValueError, match="lacks amx_bf16, amx_int8, amx_tile"):
        build.choose(build.BF16, {build.VARIABLE: "amx"})


def test_an_unknown_level_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "sse")
    with pytest.raises(ConfigError, match=r"sse is not one of amx, .*, none"):
        load_best(build.AMX, threads=1)


def test_no_compiler_means_plain_torch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(build.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert build.describe(build.AVX2).startswith("none, plain torch: no C++ compiler found")
    assert load_best(build.AVX2, threads=1) is None
    assert "install g++ or the package ziglang, or set CXX" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'cannot make this' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path))
    monkeypatch.setenv(build.VARIABLE, "generic")
    assert build.describe(frozenset()) == f"generic, to be compiled by {broken} on first use"
    with pytest.raises(build.NoKernels, match="cannot make this"):
        build.compile_library(build.LEVELS[-1], build.cache_folder())
    assert not list(build.cache_folder().glob("*.so"))
    assert build.describe(frozenset()) == f"none, plain torch: {broken} failed: cannot make this"
    assert not build.available(frozenset())
    monkeypatch.setenv("CXX", "sh")  # another one may do better
    assert build.available(frozenset())


def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path))
    level = build.LEVELS[-1]
    ours = build.cache_folder() / build.library_name(level)
    ours.parent.mkdir()
    (ours.parent / f"{level.name}-0123456789abcdef.so").touch()
    assert build.find(level) is None
    ours.touch()
    assert build.find(level) == ours


def test_what_is_not_a_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "avx2.so"
    path.write_bytes(b"no library")
    with pytest.raises(build.NoKernels, match=r"avx2\.so cannot be loaded"):
        Kernels(path, "avx2", threads=1)


@pytest.mark.parametrize(
    ("name", "gnu", "zig"),
    [
        ("amx", "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8", None),
        ("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", "-mcpu=x86_64_v4+avx512vnni"),
        ("neon", "-march=armv8.2-a+dotprod", "-mcpu=generic+v8_2a+dotprod"),
        ("generic", "", ""),
    ],
)
def test_compilers_are_told_of_a_level_in_their_own_words(name: str, gnu: str, zig: str | None) -> None:
    level = next(level for level in build.LEVELS if level.name == name)
    assert " ".join(level.arguments(zig=False)) == gnu
    assert zig is None or " ".join(level.arguments(zig=True)) == zig


def test_the_package_ziglang_compiles_where_the_system_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_spec", lambda name: name == "ziglang")
    found = build.compiler({})
    assert found is not None
    assert found.zig
    assert found.compiles(build.LEVELS[0])[1:4] == ("-m", "ziglang", "c++")
    assert found.links()[1:4] == ("-m", "ziglang", "cc")
    assert build.compiler({"CXX": "absent"}) is None
