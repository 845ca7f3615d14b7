"""A matrix times one vector: what decoding a single request is made of, and nothing but reading the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _matvec(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    at = tl.arange(0, BLOCK)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * columns + at[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        if EVEN:
            x = tl.load(x_ptr + start + at)
            w = tl.load(weight_at + start, mask=known[:, None], other=0.0)
        else:
            inside = start + at < columns
            x = tl.load(x_ptr + start + at, mask=inside, other=0.0)
            w = tl.load(weight_at + start, mask=known[:, None] & inside[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, axis=1)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=known)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns a step, and warps of a program, as measured to be fast on an H200 (ci/bench/h200)."""
    if rows >= 1 << 14:
        return 4, 512, 1
    if columns <= 1024:
        return (2, 1024, 4) if rows < 4096 else (4, 1024, 2)
    if columns > 8192:
        return 4, 1024, 2
    return (2, 2048, 8) if rows < 2048 else (4, 512, 4)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one vector in 16 bits, whose products lose nothing in float32 sums, and the matrix is plain."""
    return len(x) == 1 and x.ndim == 2 and x.element_size() == 2 and weight.is_contiguous() and x.stride(1) == 1


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, int, int] | None = None,
) -> Tensor:
    """[1, I] times [O, I] → [1, O], summed in float32. `shape`: rows, columns a step, and warps of a program."""
    rows, columns = weight.shape
    out = x.new_empty(1, rows, dtype=dtype or x.dtype)
    each, block, warps = shape or shape_of(rows, columns)
    _matvec[(triton.cdiv(rows, each),)](
        x, weight, weight if bias is None else bias, out, rows, columns,
        ROWS=each, BLOCK=block, BIAS=bias is not None, EVEN=columns % block == 0, num_warps=warps,
    )  # fmt: skip
    return out
