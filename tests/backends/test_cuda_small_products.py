"""Products with small matrices and their parts: in Triton's interpreter against float64, and where they are used."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract import checks
from anycore_cuda.kernels import norm, small_products
from anycore_cuda.kernels.gated import KINDS, gated
from anycore_cuda.kernels.small_products import VARIANTS, Parts, Shape, parts, parts_shape_of, product, shape_of

CASES = [  # rows of x, of the matrix, columns
    (2, 40, 96, Shape(16, 16, 32, 4, 3)),
    (19, 48, 104, Shape(16, 16, 32, 4, 3, 2)),  # the last tiles of rows and columns are not full
    (33, 20, 64, Shape(32, 32, 16, 4, 3)),
]


def numbers(rows: int, outs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(outs, width, generator=generator) * width**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outs, generator=generator).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_products_are_those_of_float64(case: tuple[int, int, int, Shape]) -> None:
    rows, outs, width, shape = case
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        x, weight, bias = numbers(rows, outs, width, dtype)
        exact = x.double() @ weight.double().T
        for added in (None, bias):
            got = product(x, weight, shape, added)
            wanted = exact if added is None else exact + bias.double()
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
            assert got.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_gives_what_its_own_kernel_does(kind: str) -> None:
    for rows, outs, width, shape in CASES:
        x, weight, bias = numbers(rows, outs, width, torch.float16)
        for added in (None, bias):
            apart = gated(product(x, weight, shape, added), kind)
            torch.testing.assert_close(product(x, weight, shape, added, kind), apart, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_norm_joins_parts_as_if_they_were_a_product(case: tuple[int, int, int, Shape], splits: int) -> None:
    rows, outs, width, shape = case
    x, weight, residual = numbers(rows, outs, width, torch.float16)
    residual = residual.expand(rows, outs).contiguous()
    scale = torch.rand(outs) + 0.5
    got = parts(x, weight, shape._replace(splits=splits))
    assert got.sums.shape == (splits, rows, outs)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(got.sums.double().sum(0), exact, rtol=1e-5, atol=1e-5)
    joined = got.sums[0]
    for part in got.sums[1:]:
        joined = joined + part
    for added in (residual, None):
        wanted = norm.rms_norm(joined.half(), scale, 1e-6, added)
        for one, other in zip(norm.rms_norm(got, scale, 1e-6, added), wanted, strict=True):
            assert torch.equal(one, other)


def test_shapes_change_at_powers_of_2_only() -> None:
    for outs, width in ((1152, 896), (896, 896), (9728, 896), (896, 4864), (4096, 1024), (6144, 1024), (1024, 3072)):
        for of in (shape_of, parts_shape_of, lambda outs, width, rows: shape_of(outs, width, rows, True)):
            shapes = [of(outs, width, rows) for rows in range(2, 257)]
            for rows, shape in enumerate(shapes, 2):
                assert shape == of(outs, width, max(2, 1 << (rows - 1).bit_length()))
            assert set(shapes) - {None} <= {of(outs, width, rows) for rows in VARIANTS}


def test_small_matrices_are_multiplied_here_at_2_to_256_rows() -> None:
    assert shape_of(1152, 896, 8) == shape_of(896, 896, 64) == Shape(64, 32, 128, 4, 4, 16)
    assert shape_of(896, 896, 128) == Shape(64, 32, 128, 4, 4, 8)
    assert shape_of(896, 896, 256) == Shape(64, 32, 128, 4, 4, 4)
    assert [shape_of(896, 896, rows) for rows in (1, 257)] == [None, None]
    assert [shape_of(9728, 896, rows, True) for rows in (8, 16, 129, 256)] == [None] * 4
    assert shape_of(9728, 896, 32, True) == shape_of(9728, 896, 64, True) == Shape(64, 64, 64, 4, 6)
    assert shape_of(9728, 896, 128, True) == Shape(128, 64, 64, 8, 5, 16)
    assert shape_of(6144, 1024, 64, True) == Shape(64, 32, 64, 4, 5)
    assert shape_of(9728, 896, 64) is shape_of(3584, 3584, 64) is shape_of(896, 4864, 64) is None
    splits = {rows: parts_shape_of(896, 4864, rows).splits for rows in (8, 64, 128, 256)}  # type: ignore[union-attr]
    assert splits == {8: 9, 64: 4, 128: 9, 256: 4}
    assert parts_shape_of(896, 896, 64) is parts_shape_of(3584, 18944, 64) is parts_shape_of(896, 4864, 257) is None


def test_the_operations_use_them_on_the_measured_chip_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "LEAST", 0)
    asked: list[str | None] = []

    def watched(x: Tensor, weight: Tensor, shape: Shape, bias: Tensor | None, gate: str | None, early: bool) -> Tensor:
        asked.append(gate)
        return product(x, weight, shape, bias, gate, early)

    monkeypatch.setattr(small_products, "product", watched)
    for measured, wanted in ((False, []), (True, [None, "silu"])):
        asked.clear()
        backend = interpreted()
        backend.ops.measured = measured  # type: ignore[attr-defined]
        for rows, shape, gate in ((9, (40, 48), None), (17, (48, 48), "silu")):
            checks.check_norm_linear(backend, "float16", rows, shape, gate, True, True)
        assert asked == wanted


def test_parts_go_from_linear_for_norm_to_the_next_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_products, "LEAST", 0)
    x, weight, _ = numbers(5, 24, 600, torch.float16)
    after, _, residual = numbers(7, 40, 24, torch.float16)[1], None, torch.randn(5, 24).half()
    scale = torch.rand(24) + 0.5
    ops = interpreted().ops
    found = []
    for measured in (False, True):
        ops.measured = measured  # type: ignore[attr-defined]
        product_ = ops.linear_for_norm(x, weight)
        assert isinstance(product_, Parts) == measured
        found.append(
            (
                *ops.rms_norm(product_, scale, 1e-6, residual),
                *ops.norm_linear(product_, residual, scale, 1e-6, after, None, "silu"),
            )
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)
