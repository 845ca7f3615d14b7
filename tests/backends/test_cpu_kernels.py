"""Linears of the CPU backend's kernels, at every level this machine can run, against float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of

from anycore.errors import ConfigError
from anycore_cpu.kernels import build
from anycore_cpu.kernels.library import Kernels, load_best


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_linear_is_right_at_any_shape(kernels: Kernels) -> None:
    chance = random.Random(0)
    for seed in range(40):
        rows = chance.choice((1, 2, 3, 12, 16, 17, 31, 33, 65, 128, 129, 200))
        inputs, outputs = chance.choice((1, 7, 32, 33, 64, 250)), chance.choice((1, 16, 31, 32, 33, 130))
        x = normal(seed, rows, inputs + 3)[:, 1 : inputs + 1]  # rows are strided, and do not begin at a cache line
        weight, bias = normal(seed + 1, outputs, inputs + 2)[:, :inputs], normal(seed + 2, outputs)
        exact = x.double() @ weight.double().T
        matrix = kernels.pack(weight)
        wide = kernels.linear(x, matrix, None, wide=True)
        torch.testing.assert_close(wide.double(), exact, rtol=2e-5, atol=2e-5)
        narrow = kernels.linear(x, matrix, bias)
        torch.testing.assert_close(narrow.double(), exact + bias.double(), rtol=2**-8, atol=2e-5)


def test_a_row_never_feels_its_company(kernels: Kernels) -> None:
    x, matrix = normal(0, 150, 96), kernels.pack(normal(1, 100, 96))
    together = kernels.linear(x, matrix, None, wide=True)
    for rows in (1, 2, 5, 12, 13, 16, 20, 33):
        for first in (0, 64, 150 - rows):
            alone = kernels.linear(x[first : first + rows], matrix, None, wide=True)
            assert torch.equal(alone, together[first : first + rows])


def test_what_is_not_finite_stays_in_its_row(kernels: Kernels) -> None:
    x, matrix = normal(0, 40, 70), kernels.pack(normal(1, 50, 70))
    x[7, 69], x[20, 0] = torch.nan, torch.inf
    out = kernels.linear(x, matrix, None)
    broken = ~out.isfinite().all(1)
    assert broken.nonzero()[:, 0].tolist() == [7, 20]


def test_large_products_go_to_all_threads_and_agree(kernels: Kernels) -> None:
    x, weight = normal(0, 300, 512), normal(1, 2000, 512)
    out = kernels.linear(x, kernels.pack(weight), None, wide=True)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


def test_a_packed_matrix_refuses_other_rows(kernels: Kernels) -> None:
    matrix = kernels.pack(normal(0, 8, 16))
    with pytest.raises(ValueError, match="bfloat16 rows of 16"):
        kernels.linear(torch.zeros(2, 16), matrix, None)
    with pytest.raises(ValueError, match="bfloat16 rows of 16"):
        kernels.linear(torch.zeros(2, 17).bfloat16(), matrix, None)


# --- which library, and where it comes from ------------------------------------------------------------------------


def test_the_best_level_that_runs_is_taken() -> None:
    assert build.choose(build.AMX, {}).name == "amx"
    assert build.choose(build.BF16, {}).name == "avx512-bf16"
    assert build.choose(build.AVX512, {}).name == "avx512"
    assert build.choose(build.AVX2 | {"avx512f"}, {}).name == "avx2"
    with pytest.raises(build.NoKernels, match="AVX2"):
        build.choose(frozenset({"asimd"}), {})


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
    assert build.describe(build.AVX2).startswith("none, plain torch: no C++ compiler found")
    assert load_best(build.AVX2, threads=1) is None
    assert "install g++, or set CXX" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'cannot make this' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.NoKernels, match="cannot make this"):
        build.compile_library(build.LEVELS[-1], tmp_path)
    assert not list(tmp_path.glob("*.so"))


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
