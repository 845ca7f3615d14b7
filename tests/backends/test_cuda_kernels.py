"""The CUDA backend's kernels in Triton's interpreter, by the conformance kit's own float64 checks."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract import checks
from anycore.contract.batch import Batch
from anycore.contract.checks import AttentionCase
from anycore.contract.ops import Ops
from anycore_cuda.kernels import gated, norm, rotary
from anycore_cuda.kernels.matvec import matvec, norm_matvec, suits

DTYPES = ("float32", "float16")
CASES = [
    AttentionCase("float32", 16, True, 16, None, None, 6, 2, 0),
    AttentionCase("float16", 80, True, 16, None, None, 4, 4, 1),
    AttentionCase("float32", 64, True, 32, 19, None, 4, 1, 2),
    AttentionCase("float16", 32, True, 16, 5, 3.0, 6, 2, 3),
    AttentionCase("float32", 32, True, 16, None, 3.0, 14, 2, 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("processors", [1, 4])  # one split of the keys, and several
def test_paged_attention(case: AttentionCase, processors: int) -> None:
    checks.check_paged_attention(interpreted(processors), case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_packed_attention(case: AttentionCase, causal: bool) -> None:
    here = AttentionCase(case.dtype, case.head_dim, causal, 0, case.window, case.softcap, case.heads, case.kv_heads)
    checks.check_packed_attention(interpreted(), here)
    checks.check_company(interpreted(), here)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_norms(dtype: str) -> None:
    for rows, width in ((1, 48), (5, 77)):
        for with_residual in (False, True):
            checks.check_norms(interpreted(), dtype, rows, width, with_residual)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_pool(dtype: str) -> None:
    checks.check_pool(interpreted(), dtype, [7, 1, 20], 150)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_gated(dtype: str) -> None:
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        checks.check_gated(interpreted(), dtype, kind, 3, 33)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [3, 70])  # each row by itself, and in groups
def test_heads_are_prepared_as_the_contract_says(normed: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    heads, kv_heads, dim, size = 4, 2, 24, 16
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator)
    angles = torch.rand(rows, dim // 2, generator=generator) * 6
    turns = angles.cos(), angles.sin()
    weights = torch.randn(2, dim, generator=generator)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    cache = torch.zeros(2, 8, kv_heads, size, dim)
    slots = torch.randperm(8 * size, generator=generator)[:rows]
    q, k, v = qkv.double().split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    if normed:
        q, k = (x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w for x, w in zip((q, k), weights, strict=True))
    q, k = (turn(x, angles.double()) for x in (q, k))
    rotary.prepare_heads(qkv, heads, kv_heads, turns, norms, cache, slots)
    torch.testing.assert_close(qkv[:, : heads + kv_heads].double(), torch.cat((q, k), dim=1), rtol=1e-5, atol=1e-5)
    for side, exact in zip(cache.double(), (k, v), strict=True):
        stored = side[slots // size, :, slots % size]
        torch.testing.assert_close(stored, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("processors", [1, 40])  # one split of the keys, and several
def test_decoding_prepares_heads_on_the_way(normed: bool, processors: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, size, lens = 6, 2, 24, 16, [1, 300, 17, 32]
    tables = torch.arange(1, 1 + 4 * 19, dtype=torch.int32).view(4, 19)
    places = torch.tensor([length - 1 for length in lens])
    slots = tables[torch.arange(4), places // size].long() * size + places % size
    slots[0] = 5  # a row that only fills up a captured batch: what it stores is not where it reads
    found = []
    for ops, heads_first in ((Ops(), False), (interpreted(processors).ops, True)):
        generator.manual_seed(1)
        qkv = torch.randn(4, heads + 2 * kv_heads, dim, generator=generator)
        cache = torch.randn(2, 80, size, kv_heads, dim, generator=generator)
        cache = cache.transpose(2, 3).contiguous() if heads_first else cache
        weights = torch.randn(2, dim, generator=generator)
        angles = torch.rand(4, dim // 2, generator=generator) * 6
        batch = Batch(
            input_ids=places, positions=places, query_lens=[1] * 4, context_lens=places.tolist(), output_rows=None,
            causal=True, slots=slots, block_tables=tables, kv=[cache], block_size=size,
        )  # fmt: skip
        if heads_first:  # the longest first changes nothing but when each is computed
            batch.order = torch.tensor([1, 3, 2, 0], dtype=torch.int32)
        norms = (weights[0], weights[1], 1e-6) if normed else None
        turns = angles.cos(), angles.sin()
        out = ops.self_attention(qkv, heads, kv_heads, norms, turns, cache, batch, 0.2, window=40)
        found.append((out, cache.transpose(2, 3) if heads_first else cache))
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@pytest.mark.parametrize("shape", [(5, 40), (70, 1100), (3, 9000)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_matrix_times_one_vector(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    x, bias = (
        torch.randn(1, shape[1], generator=generator).to(dtype),
        torch.randn(shape[0], generator=generator).to(dtype),
    )
    exact = x.double() @ weight.double().T
    assert suits(x, weight)
    torch.testing.assert_close(matvec(x, weight, dtype=torch.float32).double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matvec(x, weight, bias).double(), exact + bias.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_norm_and_product(dtype: str) -> None:
    for rows, shape, gate, with_residual, biased in (
        (1, (14, 77), None, True, True), (1, (22, 48), "silu", True, False), (1, (6, 1100), "gelu", False, True),
        (3, (14, 77), "silu", True, True),
    ):  # fmt: skip
        checks.check_norm_linear(interpreted(), dtype, rows, shape, gate, with_residual, biased)


@pytest.mark.parametrize("gate", [None, *gated.KINDS])
def test_norm_product_and_gate_are_those_of_three_kernels(gate: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    cases = [
        (torch.float16, True, (6, 48), None),
        (torch.bfloat16, True, (22, 1100), (8, 512, 4)),
        (torch.float16, False, (10, 300), (2, 64, 1)),
    ]
    for dtype, with_residual, (rows, columns), shape in cases:
        weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)
        x, added = (torch.randn(1, columns, generator=generator).to(dtype) for _ in range(2))
        bias = torch.randn(rows, generator=generator).to(dtype)
        scale = torch.randn(columns, generator=generator)
        residual = added if with_residual else None
        normed, total = norm.rms_norm(x, scale, 1e-6, residual)
        product = matvec(normed, weight, bias, shape=shape)
        wanted = product if gate is None else gated.gated(product, gate)
        got, summed = norm_matvec(x, residual, scale, 1e-6, weight, bias, gate, shape)
        assert torch.equal(summed, total)
        # Not equal bit by bit: the mean may be summed in another order.
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 2e-3)
