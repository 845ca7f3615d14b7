"""Rows rounded to int8 or e4m3, each by its own largest element, alone or as the norm that makes them leaves them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch

LARGEST = {"int8": 127.0, "e4m3": 448.0}
TORCH = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@triton.jit
def largest_of(x):
    # NaN counts as infinite: the row's scale, and with it every result, then is no number either.
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """To the nearest number of that kind, ties to even; still as float32, which adding and taking away rounds."""
    if KIND == "int8":
        return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0) - 12582912.0
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    three = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # bits of the mantissa
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, three)  # below, steps of 2**-9


@triton.jit
def _round(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, total_ptr, width, eps,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    if NORM:
        shrink = tl.rsqrt(tl.sum(wide * wide) / width + eps)
        wide = (wide * shrink * tl.load(weight_ptr + at, mask=inside, other=0.0)).to(x.dtype).to(tl.float32)
    largest = tl.max(largest_of(wide))
    inverse = tl.where(largest > 0, LARGEST / largest, 0.0)
    tl.store(out_ptr + row + at, rounded(wide * inverse, KIND).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + tl.program_id(0), largest / LARGEST)


def round_rows(
    x: Tensor,
    kind: str,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    early: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R, I] → ([R, I] int8 or e4m3, their scales [R] float32, x + residual), after `ops.rms_norm` if given `norm`."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=TORCH[kind], device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    block = triton.next_power_of_2(width)
    if rows:
        launch(
            _round, (rows,),
            x, added, x if norm is None else norm, out, scale, total, width, eps,
            NORM=norm is not None, RESIDUAL=residual is not None, KIND=kind, LARGEST=LARGEST[kind], BLOCK=block,
            EARLY=early, num_warps=min(16, max(1, block // 512)), **launch_options(early),
        )  # fmt: skip
    return out, scale, total
