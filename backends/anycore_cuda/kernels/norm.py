"""Residual sum and normalisation in one pass over memory: one program a row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.small_products import Parts


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, rows, width, eps,
    PARTS: tl.constexpr, RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)  # no step writes these two
    if BIAS:
        bias = tl.load(bias_ptr + at, mask=inside, other=0.0)
    wait(EARLY)
    if RESIDUAL:
        added = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if PARTS:  # the first of these; a product that is not left in parts is summed and rounded like this
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * rows.to(tl.int64) * width + row + at, mask=inside, other=0.0)
        x = x.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    if RESIDUAL or PARTS:
        tl.store(sum_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide) / width, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    out = wide * scale * weight
    if BIAS:
        out += bias
    tl.store(out_ptr + row + at, out.to(x.dtype), mask=inside)


def rms_norm(
    x: Tensor | Parts, weight: Tensor, eps: float, residual: Tensor | None, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual); the last dimension is a row. Parts of x are joined first."""
    return _launch(x, weight, None, eps, residual, False, early)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual); the last dimension is a row."""
    return _launch(x, weight, bias, eps, residual, True, early)


def _launch(
    x: Tensor | Parts,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    centred: bool,
    early: bool,
) -> tuple[Tensor, Tensor]:
    parts = len(x.sums) if isinstance(x, Parts) else 0
    given = x.sums if isinstance(x, Parts) else x.contiguous()
    shape = given.shape[1:] if parts else given.shape
    out = given.new_empty(shape, dtype=x.dtype)
    total = given if residual is None and not parts else torch.empty_like(out)
    added = given if residual is None else residual.contiguous()
    width = shape[-1]
    rows = out.numel() // width
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // (256 if parts else 512)))
    if rows:
        launch(
            _norm, (rows,),
            given, added, weight, weight if bias is None else bias, out, total, rows, width, eps,
            PARTS=parts, RESIDUAL=residual is not None, CENTRED=centred, BIAS=bias is not None, BLOCK=block,
            EARLY=early, num_warps=warps, **launch_options(early),
        )  # fmt: skip
    return out, total
