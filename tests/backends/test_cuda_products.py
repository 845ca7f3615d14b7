"""Products of tens and hundreds of rows: in Triton's interpreter against float64, and through its compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract import checks
from anycore_cuda.kernels import products
from anycore_cuda.kernels.gated import KINDS, gated
from anycore_cuda.kernels.launch import KNOWN
from anycore_cuda.kernels.products import Shape, parts_of, product, variant_of

WHOLE = Shape(16, 16, 0, 4, 3)
CASES = [  # rows of x, of the matrix, columns
    (1, 40, 96, WHOLE),
    (5, 40, 96, Shape(16, 16, 5, 4, 3)),  # no tile belongs to one program
    (20, 40, 96, Shape(16, 16, 5, 4, 3, last=True)),
    (7, 112, 48, Shape(16, 16, 3, 4, 3)),  # two whole tiles for each, and one that they share
    (7, 112, 48, Shape(16, 16, 5, 4, 3, last=True)),
    (7, 160, 48, Shape(16, 16, 7, 4, 3)),  # fewer turns are left over than there are programs
    (70, 70, 64, Shape(32, 16, 0, 4, 3)),
    (33, 64, 120, Shape(16, 32, 3, 4, 3, last=True)),  # the last turn is not full
    (9, 16, 32, Shape(16, 16, 132, 4, 3)),  # more programs than turns
]
COMPILED = Path(__file__).with_name("cuda_products.py")


def numbers(rows: int, outs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(outs, width, generator=generator) * width**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outs, generator=generator).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(case: tuple[int, int, int, Shape]) -> None:
    rows, outs, width, shape = case
    counters = torch.zeros(64, dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        x, weight, bias = numbers(rows, outs, width, dtype)
        exact = x.double() @ weight.double().T
        plain = product(x, weight, shape, counters, dtype=torch.float32)
        torch.testing.assert_close(plain.double(), exact, rtol=1e-5, atol=1e-5)
        got = product(x, weight, shape, counters, bias)
        torch.testing.assert_close(got.double(), exact + bias.double(), rtol=tolerance, atol=tolerance)
        assert got.dtype == dtype
        assert torch.equal(got, product(x, weight, shape, counters, bias))
        assert not counters.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
def test_a_gate_gives_what_its_own_kernel_does(case: tuple[int, int, int, Shape], kind: str) -> None:
    rows, outs, width, shape = case
    counters = torch.zeros(64, dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        x, weight, bias = numbers(rows, outs, width, dtype)
        wanted = gated(product(x, weight, shape, counters, bias), kind)
        got = product(x, weight, shape, counters, bias, kind)
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_rows_are_held_in_one_or_two_powers_of_2() -> None:
    held = {rows: parts_of(rows) for rows in (1, 16, 17, 40, 64, 100, 128, 129, 144, 160, 192, 193, 256)}
    assert held == {
        1: (16, 0), 16: (16, 0), 17: (32, 0), 40: (64, 0), 64: (64, 0), 100: (128, 0), 128: (128, 0), 129: (128, 16),
        144: (128, 16), 160: (128, 32), 192: (128, 64), 193: (256, 0), 256: (256, 0),
    }  # fmt: skip


def test_large_matrices_times_few_rows_are_multiplied_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variant_of(3584, 18944, 8) == Shape(64, 128, 264, 4, 5)
    assert variant_of(37888, 3584, 64, gated=True) == Shape(64, 128, 132, 8, 4)
    assert variant_of(3584, 18944, 65) is None
    assert variant_of(4608, 3584, 8) is None
    assert variant_of(151936, 896, 8) is None

    def small(outs: int, width: int, rows: int, gated: bool = False) -> Shape | None:
        return Shape(16, 16, 3 if gated else 2, 4, 3) if 9 <= rows <= 64 else None

    monkeypatch.setattr(products, "variant_of", small)
    asked: list[tuple[int, ...]] = []

    def watched(x: Tensor, weight: Tensor, *more: object, **options: object) -> Tensor:
        asked.append((len(x), *weight.shape))
        return product(x, weight, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(products, "product", watched)
    backend = interpreted()
    backend.ops.measured = True  # type: ignore[attr-defined]
    for rows, shape, gate in ((9, (40, 48), None), (8, (40, 48), None), (9, (44, 48), "silu"), (70, (44, 48), "silu")):
        checks.check_norm_linear(backend, "float16", rows, shape, gate, True, True)
    assert asked == [(9, 40, 48), (9, 44, 48)]


def test_deep_products_ask_cublaslt_and_leave_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {rows for rows in (1, 64, 65, 144, 255, 256) if products.deep(3584, 18944, rows)}
    assert rows == {65, 144, 255}
    assert not products.deep(37888, 3584, 144)
    assert not products.deep(896, 4864, 144)

    chosen = ["cublas"]

    def preferred(library: str | None = None) -> str:
        chosen.append(library or chosen[-1])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    monkeypatch.setattr(products, "LARGE", 16 * 48)
    backend = interpreted()
    backend.ops.measured = True  # type: ignore[attr-defined]
    checks.check_linear(backend, "float16", 65, (16, 48), True)
    assert "cublaslt" in chosen
    assert chosen[-1] == "cublas"


@pytest.mark.skipif(not KNOWN, reason="another version of Triton compiles other programs")
def test_compiled_products_stay_in_registers(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, COMPILED], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for shape, kernel in json.loads(found.stdout.splitlines()[-1]).items():
        assert kernel["wgmma"], shape
        assert kernel["stack"] == 0, shape
        assert kernel["shared"] <= 227 << 10, shape
        assert kernel["waits"], shape
