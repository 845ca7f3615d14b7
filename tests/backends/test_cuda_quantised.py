"""Products with quantised weights by the CUDA backend's kernels, in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract.backend import Backend
from anycore.contract.check_weights import check_quantised, exact_rows, fp8_weight, int4_weight, int8_weight
from anycore.contract.weights import Int4Weight, QuantisedWeight
from anycore_cuda.kernels import quantised_linear, quantised_wide
from anycore_cuda.kernels.int4 import nibble_matvec
from anycore_cuda.kernels.int4 import shape_of as vector_shape
from anycore_cuda.kernels.quantised import Packed, pack
from anycore_cuda.kernels.quantised_dense import dense_product, dense_rows
from anycore_cuda.kernels.quantised_products import product
from anycore_cuda.kernels.quantised_rows import TORCH, fix, round_rows
from anycore_cuda.kernels.quantised_shapes import Shape, shape_of
from anycore_cuda.kernels.quantised_wide import Wide, cut, wide_of, wide_product
from anycore_cuda.ops import CudaOps

HALF = torch.float16


def opened(e4m3: bool = True) -> Backend:
    """As on a chip that multiplies e4m3, or on one that does not."""
    backend = interpreted()
    assert isinstance(backend.ops, CudaOps)
    backend.ops.chip = replace(backend.ops.chip, e4m3=e4m3)
    return backend


def weights_of(shape: tuple[int, int], seed: int = 0) -> list[QuantisedWeight]:
    generator = torch.Generator().manual_seed(seed)
    found: list[QuantisedWeight] = [int8_weight(shape, group, HALF, generator) for group in (shape[1], 16, 32)]
    found += [int4_weight(shape, group, HALF, generator) for group in (16, 32, 64, 128, shape[1])]
    return [*found, fp8_weight(shape, HALF, generator)]


def few_of(shape: tuple[int, int]) -> list[QuantisedWeight]:
    """One of each kind: int8, 4 bits in groups of 16, e4m3."""
    every = weights_of(shape)
    return [every[0], every[3], every[-1]]


def allowed(packed: Packed) -> float:
    """Absolute error of results near 1: of rounded rows, or of 16-bit scales and results."""
    return ({"int8": 4e-2, "e4m3": 1.5e-1}[packed.kind] if packed.rounds else 4e-3) + 4e-3


def rounded_twice(x: Tensor, kind: str) -> Tensor:
    """What a row becomes by torch's own rounding, in float64."""
    scale = x.abs().amax(1, keepdim=True).float() / {"int8": 127, "e4m3": 448}[kind]
    numbers = (x.float() / scale).round() if kind == "int8" else (x.float() / scale).to(TORCH[kind])
    return numbers.double() * scale.double()


@pytest.mark.parametrize(("dtype", "rows", "e4m3"), [("float16", 0, True), ("float16", 5, False), ("float32", 5, True)])
def test_the_kit(dtype: str, rows: int, e4m3: bool) -> None:
    check_quantised(opened(e4m3), dtype, rows, biased=rows > 1)


@pytest.mark.parametrize("shape", [(3, 256), (5, 96), (3, 576), (2, 1100), (2, 8), (4, 352)], ids=str)
def test_rows_become_what_they_stand_for(shape: tuple[int, int]) -> None:
    for weight in weights_of(shape):
        packed = pack(weight, e4m3=True)
        assert isinstance(packed, Packed)
        exact = exact_rows(weight)
        got = dense_rows(packed)
        torch.testing.assert_close(got.double(), exact, rtol=2e-3, atol=1e-3 * float(exact.abs().max()))
        ids = torch.tensor([1, 0, 1])
        assert torch.equal(dense_rows(packed, ids=ids), got[ids])


def test_a_layout_takes_what_the_plan_counts() -> None:
    from anycore.contract.formats import Format

    for columns in (576, 640, 3584):
        for weight, kind in zip(weights_of((8, columns)), ("int8",) * 3 + ("int4",) * 5 + ("fp8",), strict=True):
            packed = pack(weight, e4m3=True)
            assert isinstance(packed, Packed)
            group = getattr(weight, "group", 0)
            whole = kind != "int4" and group in (0, columns)
            assert packed.nbytes == Format(kind, 0 if whole else group).bytes(8, columns)


def test_scales_far_from_one_keep_their_bits() -> None:
    weight = int4_weight((4, 64), 32, HALF, torch.Generator().manual_seed(1))
    for factor in (1e-9, 1.0, 1e3):
        scaled = Int4Weight(weight.data, weight.scale * factor, weight.zero, weight.group, torch.float32)
        packed = pack(scaled, e4m3=True)
        assert isinstance(packed, Packed)
        torch.testing.assert_close(
            dense_rows(packed).double(),
            exact_rows(scaled),
            rtol=2e-3,
            atol=1e-3 * float(exact_rows(scaled).abs().max()),
        )


@pytest.mark.parametrize("shape", [(6, 1100), (4, 352), (3, 96), (2, 256)], ids=str)
def test_one_row_with_all_around_it(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, columns = shape
    x, residual = torch.randn(2, 1, columns, generator=generator, dtype=torch.float32).half().unbind(0)
    scale = 1 + torch.rand(columns, generator=generator)
    bias = torch.randn(outputs, generator=generator).half()
    every = weights_of(shape)
    for weight, e4m3 in (*((weight, True) for weight in every), (every[-1], False)):
        ops = opened(e4m3).ops
        packed = ops.pack(weight)
        gate = "silu" if outputs % 2 == 0 else None
        out, total = ops.norm_linear(x, residual, scale, 1e-6, packed, bias, gate)
        assert torch.equal(total, x + residual)
        wide = total.double()
        normed = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale).half()
        exact = normed.double() @ exact_rows(weight).T + bias
        if gate:
            exact = torch.nn.functional.silu(exact[:, : outputs // 2]) * exact[:, outputs // 2 :]
        # A row rounded to e4m3 is off by a sixteenth in places, and so may be either factor of a gate.
        room = 5 * allowed(packed) if gate else 2 * allowed(packed)
        torch.testing.assert_close(out.double(), exact, rtol=room, atol=room)


@pytest.mark.parametrize("shape", [(4, 16, 1, 2), (8, 16, 1, 1), vector_shape(1 << 16, 1100)], ids=str)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_program_goes_from_tile_to_tile(gate: str | None, shape: tuple[int, int, int, int]) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = int4_weight((22, 1100), 1100, torch.float16, generator)  # three or six tiles of three turns, none full
    packed = opened().ops.pack(weight)
    x = torch.randn(1, 1100, generator=generator).half()
    out = nibble_matvec(fix(x, packed)[0], packed, None, torch.float32, 1, gate, shape=shape)
    exact = x.double() @ exact_rows(weight).T
    if gate:
        exact = torch.nn.functional.silu(exact[:, :11]) * exact[:, 11:]
    torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("columns", "group", "width"), [(3584, 128, 16), (576, 64, 8), (352, 16, 4), (1100, 1100, 4)])
def test_a_vector_in_fixed_point_keeps_16_bits(columns: int, group: int, width: int) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, columns, generator=generator).half()
    x[0, 3] = 1000  # costs its neighbours bits, others none
    packed = pack(int4_weight((2, columns), group, HALF, generator), e4m3=True)
    assert isinstance(packed, Packed)
    assert packed.width == width
    fixed, _ = fix(x, packed)
    # [byte, half, words] → [byte, blocks, half, byte of a word, words]: the order of columns.
    halves = fixed.bytes.view(2, 2, -1, width).transpose(1, 2).contiguous().view(torch.int8)
    upper, lower = halves.view(2, -1, 2, width, 4).transpose(3, 4).reshape(2, -1).double()
    unit = fixed.unit.double().repeat_interleave(256)
    error = ((256 * upper + lower)[:columns] * unit[:columns] - x[0].double()).abs()
    assert bool((error <= unit[:columns] / 1.99).all())
    assert float(fixed.unit[-1]) < 1e-3


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_rows_are_rounded_as_torch_rounds(kind: str) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-3 * torch.logspace(-4, 0, 300)
    x[2] = 0
    numbers, scale, _ = round_rows(x, kind)
    expected = torch.nan_to_num(rounded_twice(x, kind))
    torch.testing.assert_close(numbers.double() * scale.double()[:, None], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_that_is_no_number_stays_one(kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = int8_weight((8, 64), 64, HALF, generator) if kind == "int8" else fp8_weight((8, 64), HALF, generator)
    ops = opened().ops
    x = torch.randn(rows, 64, generator=generator).half()
    for bad in (float("nan"), float("inf")):
        x[0, 5] = bad
        out = ops.linear(x, ops.pack(weight))
        assert not out[0].isfinite().any()
        assert out[1:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rounded_rows_do_not_depend_on_company(rows: int) -> None:
    generator = torch.Generator().manual_seed(4)
    ops = opened().ops
    x = torch.randn(rows, 352, generator=generator).half()
    for weight in (int8_weight((6, 352), 352, HALF, generator), fp8_weight((6, 352), HALF, generator)):
        packed = ops.pack(weight)
        exact = rounded_twice(x, packed.kind) @ exact_rows(weight).T
        torch.testing.assert_close(ops.linear(x, packed).double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rows", [70, 130])
def test_rows_that_are_no_power_of_two_are_two_counts_of_them(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = int4_weight((150, 352), 32, HALF, generator)
    packed, x = opened().ops.pack(weight), torch.randn(rows, 352, generator=generator).half()
    shape = shape_of(packed, rows, 132)
    assert shape.more
    out = product(x, packed, None, None, torch.float32, 132, shape)
    torch.testing.assert_close(out.double(), x.double() @ exact_rows(weight).T, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("splits", [1, 3])
def test_columns_may_be_split(splits: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 1100, generator=generator).half()
    bias = torch.randn(20, generator=generator).half()
    for e4m3 in (True, False):
        for weight in few_of((20, 1100)):
            packed = pack(weight, e4m3)
            assert isinstance(packed, Packed)
            numbers, scale = (x, None) if not packed.rounds else round_rows(x, packed.kind)[:2]
            factor = x.double() if not packed.rounds else rounded_twice(x, packed.kind)
            exact = factor @ exact_rows(weight).T + bias
            out = product(numbers, packed, scale, bias, torch.float32, 2, Shape(64, 16, 128, 4, 1, splits))
            torch.testing.assert_close(out.double(), exact, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("columns", [128, 256])
def test_tiles_left_over_are_split(columns: int) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = int4_weight((300, 1056), 96, HALF, generator)
    packed, x = pack(weight, True), torch.randn(20, 1056, generator=generator).half()
    assert isinstance(packed, Packed)
    bias = torch.randn(300, generator=generator).half()
    exact = x.double() @ exact_rows(weight).T + bias
    out = product(x, packed, None, bias, torch.float32, 2, Shape(64, 16, columns, 4, 1, 3, 16, whole=3))
    torch.testing.assert_close(out.double(), exact, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("shape", "group"),
    [
        (Wide(64, 0, 128, 1, 8, 2), 64),
        (Wide(32, 16, 64, 2, 4, 2, 2), 128),
        (Wide(16, 64, 128, 1, 8, 2), 192),
        (Wide(128, 16, 64, 2, 4, 2, 2), 768),
    ],
    ids=str,
)
def test_the_copy_engine_brings_tiles(shape: Wide, group: int) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = int4_weight((300, 768), group, HALF, generator)
    packed, x = opened().ops.pack(weight), torch.randn(70, 768, generator=generator).half()
    assert quantised_wide.fits(x, packed)
    bias = torch.randn(300, generator=generator).half()
    out = wide_product(x, packed, bias, torch.float32, 2, shape)
    torch.testing.assert_close(out.double(), x.double() @ exact_rows(weight).T + bias, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("columns", "group", "wide"), [(1000, 1000, True), (256, 64, True), (352, 32, False)])
def test_many_rows_of_any_columns(columns: int, group: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = int4_weight((150, columns), group, HALF, generator)
    ops = opened().ops
    seen: list[int] = []

    def watched(x: Tensor, *args: Any, **more: Any) -> Tensor:
        seen.append(len(x))
        return wide_product(x, *args, **more)

    monkeypatch.setattr(quantised_linear, "wide_product", watched)
    packed, bias = ops.pack(weight), torch.randn(150, generator=generator).half()
    x = torch.randn(66, columns + 1, generator=generator).half()[:, 1:]  # which does not lie as it has to
    out = ops.linear(x, packed, bias)
    torch.testing.assert_close(out.double(), x.double() @ exact_rows(weight).T + bias, rtol=6e-3, atol=6e-3)
    ops.linear(x[:64], packed)
    assert seen == ([66] if wide else [])


def test_parts_of_columns_all_have_a_turn() -> None:
    for outputs, columns in ((37888, 3584), (3584, 18944), (4608, 3584), (3584, 3584), (300, 256)):
        data, scale = torch.empty(outputs, columns // 8, device="meta"), torch.empty(outputs, columns // 128, 2)
        packed = Packed("int4", data, scale, columns, 128, 1.0, HALF, False)
        for rows in (65, 128, 144, 192, 256):
            _, splits = cut(packed, rows, wide_of(packed, rows), 132)
            turns = columns // 128
            assert (splits - 1) * -(-turns // splits) < turns


def test_many_rows_meet_a_tile_of_the_matrix_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from anycore_cuda.kernels import quantised_dense

    monkeypatch.setattr(quantised_dense, "WORKSPACE", 1)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(6)).half()
    for weight, dtype in zip(few_of((140, 96)), (HALF, torch.float32, HALF), strict=True):
        packed = pack(weight, e4m3=False)
        assert isinstance(packed, Packed)
        out = dense_product(x, packed, dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), x.double() @ exact_rows(weight).T, rtol=8e-3, atol=8e-3)


def test_whole_tiles_are_as_many_as_keep_all_processors_busy() -> None:
    packed = Packed("int4", torch.empty(37888, 448), torch.empty(1, 28, 2), 3584, 128, 1.0, HALF, False)
    shape = shape_of(packed, 144, 132)
    assert (shape.outputs, shape.whole, shape.splits) == (128, 264, 4)
    assert cut(packed, 144, wide_of(packed, 144), 132) == (264, 7)


def test_a_few_tiles_are_split_until_the_processors_are_busy() -> None:
    packed = pack(int4_weight((64, 8192), 128, HALF, torch.Generator().manual_seed(0)), e4m3=True)
    assert isinstance(packed, Packed)
    shapes = [shape_of(packed, rows, 132) for rows in (2, 16, 64, 256)]
    assert all(shape.splits > 1 for shape in shapes)
    assert [shape.rows for shape in shapes[:2]] == [16, 16]
