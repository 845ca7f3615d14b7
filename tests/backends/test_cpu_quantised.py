"""Quantised matrices of the CPU backend's kernels, at every level this machine can run, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract.check_weights import exact_rows, fp8_weight, int4_weight, int8_weight
from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, spread
from anycore_cpu.kernel_ops import KernelOps
from anycore_cpu.kernels import quantised
from anycore_cpu.kernels.library import Kernels

Grouped = Int8Weight | Int4Weight

STEP = 1 / 254
"""How far rounding moves a number, as a share of the largest of its group."""


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_of(shape: tuple[int, int], seed: int = 0) -> list[Grouped]:
    generator = torch.Generator().manual_seed(seed)
    made: list[Grouped] = [int8_weight(shape, group, torch.bfloat16, generator) for group in (shape[1], 16, 32)]
    for group in (16, 32, 64, 128, shape[1]):
        weight = int4_weight(shape, group, torch.bfloat16, generator)
        made += [weight, Int4Weight(weight.data, weight.scale, torch.full_like(weight.zero, 8), group, weight.dtype)]
    return made


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows as the kernels round them: to 127 steps of each group's largest number, which is found in float32."""
    out = x.float()
    for part in out.split(group, dim=1):
        most = part.abs().amax(1, keepdim=True)
        part.copy_((part * (torch.tensor(127.0) / most)).round() * (most / 127))
    return out.double()


def uncertain(weight: Grouped) -> Tensor:
    """How far 16 bits of a scale and of a minimum, both rounded, may move each number of a matrix."""
    scale = spread(weight.scale, weight.group, weight.shape[1]).double().abs()
    return 2**-11 * (exact_rows(weight).abs() + (16 * scale if isinstance(weight, Int4Weight) else 0))


def name(weight: Grouped) -> str:
    return f"{type(weight).__name__} {weight.shape} in groups of {weight.group}"


def test_products_are_those_of_the_rounded_rows(kernels: Kernels) -> None:
    """But for the 16 bits of scales; and those of the rows as they were, but for the steps of the rounding."""
    chance = random.Random(0)
    for seed in range(12):
        rows = chance.choice((1, 2, 3, 6, 7, 8, 15, 17, 31, 33, 65, 129, 200))
        shape = chance.choice((1, 31, 32, 33, 100)), chance.choice((1, 16, 33, 64, 130, 250, 576))
        x = normal(seed, rows, shape[1] + 3)[:, 1 : shape[1] + 1]  # strided, and not at the start of a cache line
        bias = normal(seed + 1, shape[0])
        for weight in weights_of(shape, seed):
            matrix, rows_of = quantised.pack(kernels, weight), exact_rows(weight)
            got = quantised.linear(kernels, x, matrix, bias, wide=True).double() - bias.double()
            exact = rounded(x, weight.group) @ rows_of.T
            slack = x.double().abs() @ uncertain(weight).T + 1e-5
            assert bool(((got - exact).abs() <= slack).all()), name(weight)
            far = x.double().abs().amax(1, keepdim=True) * STEP * rows_of.abs().sum(1)
            assert bool(((got - x.double() @ rows_of.T).abs() <= far + slack).all()), name(weight)


def test_a_row_never_feels_its_company(kernels: Kernels) -> None:
    """Not even where many rows are multiplied by other instructions than few."""
    x = normal(0, 150, 192)
    for weight in weights_of((70, 192)):
        matrix = quantised.pack(kernels, weight)
        together = quantised.linear(kernels, x, matrix, None, wide=True)
        for rows in (1, 2, 5, 7, 8, 16, 20, 33):
            for first in (0, 64, 150 - rows):
                alone = quantised.linear(kernels, x[first : first + rows], matrix, None, wide=True)
                assert torch.equal(alone, together[first : first + rows]), f"{name(weight)}, {rows} rows"


def test_threads_change_no_bit(kernels: Kernels) -> None:
    """However many round rows and take panels, in tasks that do not come out even."""
    x = normal(1, 70, 576)
    weight = int8_weight((1160, 576), 32, torch.bfloat16, torch.Generator().manual_seed(0))
    matrix = quantised.pack(kernels, weight)
    for rows in (1, 16, 31, 57, 70):
        kernels.set_threads(1)
        alone = quantised.linear(kernels, x[:rows], matrix, None)
        for threads in (2, 3, 5):
            kernels.set_threads(threads)
            for _ in range(3):
                assert torch.equal(quantised.linear(kernels, x[:rows], matrix, None), alone), f"{rows}, {threads}"
    kernels.set_threads(2)


def test_blocks_of_rows_and_slices_of_panels_change_nothing(kernels: Kernels) -> None:
    """More rows than a task has, more inputs than the first cache holds, more panels than one after the other."""
    x, generator = normal(0, 270, 1100), torch.Generator().manual_seed(0)
    for make, group in ((int8_weight, 64), (int8_weight, 1100), (int4_weight, 64)):
        weight = make((330, 1100), group, torch.bfloat16, generator)
        matrix = quantised.pack(kernels, weight)
        together = quantised.linear(kernels, x, matrix, None, wide=True)
        for first, rows in ((0, 1), (250, 13), (237, 33)):
            alone = quantised.linear(kernels, x[first : first + rows], matrix, None, wide=True)
            assert torch.equal(alone, together[first : first + rows]), f"{name(weight)}, {rows} rows"
        exact = rounded(x[:5], group) @ exact_rows(weight).T
        slack = x[:5].double().abs() @ uncertain(weight).T + 1e-3
        assert bool(((together[:5].double() - exact).abs() <= slack).all()), name(weight)


def test_all_levels_agree() -> None:
    """What is rounded is rounded alike; only the last bits of float sums differ."""
    x = normal(0, 40, 576)
    for weight in weights_of((96, 576)):
        results = []
        for level in LEVELS:
            kernels = kernels_of(level)
            results.append(quantised.linear(kernels, x, quantised.pack(kernels, weight), None, wide=True))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


def test_the_smallest_int8_is_a_number_like_others(kernels: Kernels) -> None:
    """-128 has no positive twin; sums of 16 bits would not hold it beside 127."""
    data = torch.full((32, 64), -128, dtype=torch.int8)
    x = torch.full((20, 64), -1.0).bfloat16()
    for group in (16, 64):
        matrix = quantised.pack(kernels, Int8Weight(data, torch.ones(32, 64 // group), group, x.dtype))
        for rows in (1, 20):
            got = quantised.linear(kernels, x[:rows], matrix, None, wide=True)
            torch.testing.assert_close(got, torch.full((rows, 32), 8192.0))


def test_what_is_not_finite_stays_in_its_row(kernels: Kernels) -> None:
    x = normal(0, 40, 96)
    x[7, 95], x[20, 0], x[30, :] = torch.nan, -torch.inf, 0
    for weight in weights_of((50, 96)):
        out = quantised.linear(kernels, x, quantised.pack(kernels, weight), None)
        assert (~out.isfinite()).all(1).nonzero()[:, 0].tolist() == [7, 20]
        assert bool(out[30].eq(0).all())


def test_a_group_of_equal_weights_is_its_minimum(kernels: Kernels) -> None:
    """How K-quants without a scale arrive: data 0, zero 1, and a scale that may be far from its neighbours'."""
    data, zero = torch.zeros(32, 64, dtype=torch.uint8), torch.ones(32, 2)
    scale = torch.tensor([[1e-3, -0.25]]).repeat(32, 1)
    weight = Int4Weight(data, scale, zero, 32, torch.bfloat16)
    got = quantised.linear(kernels, torch.ones(9, 64).bfloat16(), quantised.pack(kernels, weight), None, wide=True)
    torch.testing.assert_close(got, torch.full((9, 32), 32 * (0.25 - 1e-3)), rtol=1e-3, atol=0)


def test_scales_keep_their_bits_whatever_their_size(kernels: Kernels) -> None:
    x = normal(0, 3, 64)
    for size in (1e-12, 1e-6, 1e6):
        weight = int4_weight((32, 64), 32, torch.bfloat16, torch.Generator().manual_seed(0))
        weight = Int4Weight(weight.data, weight.scale * size, weight.zero, 32, weight.dtype)
        got = quantised.linear(kernels, x, quantised.pack(kernels, weight), None, wide=True)
        exact = rounded(x, 32) @ exact_rows(weight).T
        torch.testing.assert_close(got.double() / size, exact / size, rtol=1e-3, atol=1e-2)


def test_rows_come_out_as_they_went_in(kernels: Kernels) -> None:
    ids = torch.tensor([0, 31, 32, 69, 5, 5, 40] * 60)
    for weight in weights_of((70, 250)):
        got = quantised.embedding(kernels, ids, quantised.pack(kernels, weight))
        torch.testing.assert_close(got.double(), exact_rows(weight)[ids], rtol=2**-7, atol=2e-4)
    wrong = quantised.embedding(kernels, torch.tensor([0, 70, -1]), quantised.pack(kernels, weight))
    assert wrong.isnan().all(1).tolist() == [False, True, True]


def test_packed_matrices_are_as_small_as_plans_say(kernels: Kernels) -> None:
    for weight in weights_of((96, 640)):
        whole = weight.group >= 640
        kind = "int4" if isinstance(weight, Int4Weight) else "int8"
        planned = Format(kind, 0 if whole and kind == "int8" else weight.group).bytes(96, 640)
        assert quantised.pack(kernels, weight).data.nbytes <= planned, name(weight)


def test_a_matrix_refuses_other_rows(kernels: Kernels) -> None:
    matrix = quantised.pack(kernels, weights_of((8, 16))[0])
    for x in (torch.zeros(2, 16), torch.zeros(2, 17).bfloat16()):
        with pytest.raises(ValueError, match="bfloat16 rows of 16"):
            quantised.linear(kernels, x, matrix, None)


def test_operations_keep_formats_that_have_kernels(kernels: Kernels) -> None:
    """A tied table and head are one handle; what has no kernels is dense, and still a table."""
    ops, generator = KernelOps(kernels), torch.Generator().manual_seed(0)
    x, ids = normal(0, 3, 96), torch.tensor([2, 39])
    kept: list[Grouped] = [int8_weight((40, 96), 96, x.dtype, generator), int4_weight((40, 96), 32, x.dtype, generator)]
    for weight in kept:
        handle = ops.pack(weight)
        assert isinstance(handle, quantised.QuantisedMatrix)
        torch.testing.assert_close(ops.embedding(ids, handle), weight.dense()[ids], rtol=2**-7, atol=1e-4)
        assert ops.logits(x, handle).dtype == torch.float32
        torch.testing.assert_close(ops.logits(x, handle).bfloat16(), ops.linear(x, handle))
    for other in (int4_weight((40, 96), 48, x.dtype, generator), fp8_weight((40, 96), x.dtype, generator)):
        handle = ops.pack(other)
        torch.testing.assert_close(ops.embedding(ids, handle), other.dense()[ids])
        exact = (x.double() @ exact_rows(other).T).bfloat16()
        torch.testing.assert_close(ops.linear(x, handle), exact, rtol=2**-6, atol=2e-2)
