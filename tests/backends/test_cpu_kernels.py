"""Linears of the CPU backend's kernels, at every level this machine can run, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of

from anycore_cpu.kernels.library import Kernels


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


def test_rows_of_large_products_are_cut_anywhere(kernels: Kernels) -> None:
    """Several tasks in both directions, the last ones smaller, and rows whose end is padded."""
    x, weight = normal(0, 450, 590), normal(1, 1100, 590)
    matrix, bias = kernels.pack(weight), normal(2, 1100)
    together = kernels.linear(x, matrix, bias, wide=True)
    wanted = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(together.double(), wanted, rtol=1e-4, atol=1e-3)
    for first, last in ((0, 1), (10, 60), (215, 260), (417, 450)):
        alone = kernels.linear(x[first:last], matrix, bias, wide=True)
        assert torch.equal(alone, together[first:last])


def test_a_packed_matrix_refuses_other_rows(kernels: Kernels) -> None:
    matrix = kernels.pack(normal(0, 8, 16))
    with pytest.raises(ValueError, match="bfloat16 rows of 16"):
        kernels.linear(torch.zeros(2, 16), matrix, None)
    with pytest.raises(ValueError, match="bfloat16 rows of 16"):
        kernels.linear(torch.zeros(2, 17).bfloat16(), matrix, None)
