"""A matrix times one vector: what decoding a single request is made of, and nothing but reading the matrix.

The norm before it and the gate behind it can be part of the same kernel: each program norms the vector for itself,
which lies in the cache, and multiplies it with a few rows of the matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.gated import activated, check_kind
from anycore_cuda.kernels.launch import launch


@triton.jit
def _stream(x_ptr, residual_ptr, at, COLUMNS: tl.constexpr, RESIDUAL: tl.constexpr):
    # The vector with its residual, rounded as it is stored.
    x = tl.load(x_ptr + at, mask=at < COLUMNS, other=0.0)
    if RESIDUAL:
        added = tl.load(residual_ptr + at, mask=at < COLUMNS, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def rows_of(tile, rows, ROWS: tl.constexpr, GATE: tl.constexpr):
    """A tile's rows of the matrix, and which of them it has: with a gate, in turn of it and of what it multiplies."""
    row = tile * ROWS + tl.arange(0, ROWS)
    known = row < rows
    if GATE is not None:
        row = row // 2 + row % 2 * (rows // 2)
    return row, known


@triton.jit
def store_row(out, tile, bias_ptr, out_ptr, rows, ROWS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr):
    """Store a tile's results, with bias, and where they are in turn a gate and what it multiplies, their product."""
    dtype = out_ptr.dtype.element_ty
    row, known = rows_of(tile, rows, ROWS, GATE)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=known, other=0.0).to(tl.float32)
    if GATE is None:
        tl.store(out_ptr + row, out.to(dtype), mask=known)
    else:
        # Rounded where separate kernels would, so that both ways give the same numbers.
        gate, up = tl.split(tl.reshape(out.to(dtype).to(tl.float32), [ROWS // 2, 2]))
        out_row = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        product = activated(gate, GATE).to(dtype).to(tl.float32) * up
        tl.store(out_ptr + out_row, product.to(dtype), mask=out_row < rows // 2)


@triton.jit(do_not_specialize=["rows"])
def _matvec(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, rows, eps,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row, known = rows_of(tl.program_id(0), rows, ROWS, GATE)
    at = tl.arange(0, BLOCK)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * COLUMNS + at[None, :]
    # The weights of the first turn are on their way before the vector is there to be read.
    tile = tl.load(weight_at, mask=known[:, None] & (at < COLUMNS)[None, :], other=0.0)
    if NORM:
        scale = tl.load(norm_ptr + at, mask=at < COLUMNS, other=0.0)
    wait(EARLY)

    if NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            x = _stream(x_ptr, residual_ptr, start + at, COLUMNS, RESIDUAL).to(tl.float32)
            squares += x * x
        shrink = tl.rsqrt(tl.sum(squares) / COLUMNS + eps)

    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        here, following = start + at, start + BLOCK + at
        x = _stream(x_ptr, residual_ptr, here, COLUMNS, RESIDUAL)
        if RESIDUAL:  # noqa: SIM102 (a constant)
            if tl.program_id(0) == 0:
                tl.store(total_ptr + here, x, mask=here < COLUMNS)
        if NORM:
            x = (x.to(tl.float32) * shrink * scale).to(x.dtype)
            scale = tl.load(norm_ptr + following, mask=following < COLUMNS, other=0.0)
        acc += tile.to(tl.float32) * x.to(tl.float32)[None, :]
        tile = tl.load(weight_at + start + BLOCK, mask=known[:, None] & (following < COLUMNS)[None, :], other=0.0)

    store_row(tl.sum(acc, axis=1), tl.program_id(0), bias_ptr, out_ptr, rows, ROWS, BIAS, GATE)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns a turn, and warps of a program, as measured to be fast on an H200 (ci/bench/h200)."""
    if rows >= 1 << 14:
        return 4, 512, 2
    if columns <= 1024:
        return (4, 1024, 2) if rows < 4096 else (4, 512, 4)
    if rows < 2048:
        return 2, 4096, 8
    return (4, 512, 4) if rows > columns else (4, 1024, 4)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one vector in 16 bits, whose products lose nothing in float32 sums, and the matrix is plain."""
    return len(x) == 1 and x.ndim == 2 and x.element_size() == 2 and weight.is_contiguous() and x.stride(1) == 1


EARLY_BYTES = 24 << 20
"""Matrices up to this size: where reading takes much longer than a start, kernels that wait take places from others."""


def starts_early(weight: Tensor, early: bool) -> bool:
    """Whether a kernel starts before the one ahead has ended, where kernels may (kernels/early.py)."""
    return early and weight.nbytes <= EARLY_BYTES


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, int, int] | None = None,
    early: bool = False,
) -> Tensor:
    """[1, I] times [O, I] → [1, O], summed in float32. `shape`: rows, columns a turn, and warps of a program.

    `early` kernels read the matrix before they wait: it must not be the result of the kernel just before.
    """
    rows, columns = weight.shape
    out = x.new_empty(1, rows, dtype=dtype or x.dtype)
    each, block, warps = shape or shape_of(rows, columns)
    early = starts_early(weight, early)
    launch(
        _matvec, (triton.cdiv(rows, each),),
        x, x, x, weight, weight if bias is None else bias, out, x, rows, 0.0,
        COLUMNS=columns, ROWS=each, BLOCK=block, BIAS=bias is not None, NORM=False, RESIDUAL=False, GATE=None,
        EARLY=early, num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out


def norm_matvec(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    shape: tuple[int, int, int] | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) times [O, I], x + residual); with `gate` [2 O, I], and act(first half) * second half."""
    if gate is not None:
        check_kind(gate)
    rows, columns = weight.shape
    out = x.new_empty(1, rows if gate is None else rows // 2)
    total = x if residual is None else torch.empty_like(x)
    each, block, warps = shape or shape_of(rows, columns)
    early = starts_early(weight, early)
    launch(
        _matvec, (triton.cdiv(rows, each),),
        x, x if residual is None else residual, norm, weight, weight if bias is None else bias, out, total, rows, eps,
        COLUMNS=columns, ROWS=each, BLOCK=block, BIAS=bias is not None, NORM=True, RESIDUAL=residual is not None,
        GATE=gate, EARLY=early, num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out, total
