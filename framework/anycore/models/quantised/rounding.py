"""Round to nearest: a dense matrix becomes a quantised one, on whatever device it lies, some rows at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight

CHUNK = 1 << 14
"""Elements that are in float32 at a time, or a part of a large matrix: what is rounded is never there twice."""
PARTS = 32

INT8, FP8 = 127.0, 448.0
"""The largest numbers that int8 (both ways) and e4m3 hold."""


def quantise(weight: Tensor, wanted: Format, symmetric: bool = False) -> QuantisedWeight:
    """Round a matrix [out, in] to a format. `symmetric`: 4-bit numbers have 8 as their zero point.

    Scales of groups have eight significant bits, which either 16-bit type holds: backends may keep them so.
    """
    rows, columns = weight.shape
    group = wanted.group or columns
    groups = -(-columns // group)
    kind = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}[wanted.kind]
    data = torch.empty(rows, columns, dtype=kind, device=weight.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=weight.device)
    zero = torch.empty_like(scale) if wanted.kind == "int4" else None
    step = max(1, CHUNK // columns, rows // PARTS)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        wide = weight[part].float()
        if groups * group > columns:
            wide = F.pad(wide, (0, groups * group - columns))
        wide = wide.view(-1, groups, group)
        if zero is not None:
            whole, scale[part], zero[part] = four_bits(wide, symmetric)
        else:
            whole, scale[part] = scaled(wide, INT8 if wanted.kind == "int8" else FP8, exact=not wanted.group)
            whole = whole.round_() if wanted.kind == "int8" else whole
        data[part] = whole.flatten(1)[:, :columns].to(kind)
    if wanted.kind == "fp8":
        return Fp8Weight(data, scale[:, 0], weight.dtype)
    if zero is not None:
        return Int4Weight(data, scale, zero, group, weight.dtype)
    return Int8Weight(data, scale, group, weight.dtype)


def scaled(wide: Tensor, most: float, exact: bool) -> tuple[Tensor, Tensor]:
    """[rows, groups, group] → the same between -most and most, and the scale of each group; `exact`: in float32."""
    scale = nonzero(wide.abs().amax(-1) / most, exact)
    return (wide / scale[..., None]).clamp_(-most, most), scale


def four_bits(wide: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, groups, group] → whole numbers 0 … 15, and each group's scale and zero point, which is one of them."""
    if symmetric:
        scale = nonzero(wide.abs().amax(-1) / 7.5, exact=False)
        zero = torch.full_like(scale, 8.0)
    else:
        low, high = wide.amin(-1).clamp_(max=0.0), wide.amax(-1).clamp_(min=0.0)
        scale = nonzero((high - low) / 15, exact=False)
        zero = (-low / scale).round_().clamp_(0, 15)
    whole = (wide / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    return whole, scale, zero


def nonzero(scale: Tensor, exact: bool) -> Tensor:
    """A scale to divide by: 1 for groups of zeros."""
    scale = scale if exact else scale.bfloat16().float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))
