"""Residual sum and normalisation in one pass over memory: one program a row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch


@triton.jit
def _norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, width, eps,
    RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
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
        tl.store(sum_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide) / width, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    out = wide * scale * tl.load(weight_ptr + at, mask=inside, other=0.0)
    if BIAS:
        out += tl.load(bias_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row + at, out.to(x.dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual); the last dimension is a row."""
    return _launch(x, weight, None, eps, residual, False, early)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, early: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual); the last dimension is a row."""
    return _launch(x, weight, bias, eps, residual, True, early)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, centred: bool, early: bool
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    block = triton.next_power_of_2(width)
    if rows:
        launch(
            _norm, (rows,),
            x, added, weight, weight if bias is None else bias, out, total, width, eps,
            RESIDUAL=residual is not None, CENTRED=centred, BIAS=bias is not None, BLOCK=block, EARLY=early,
            num_warps=min(16, max(1, block // 512)), **launch_options(early),
        )  # fmt: skip
    return out, total
