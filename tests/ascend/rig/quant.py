"""References of the quantised products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rig.limits import need

HALVES = (torch.float16, torch.bfloat16)


def dynamic_quant(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows to int8 with one scale each: (int8, float32)."""
    x = a["input"]
    need(x.dtype in HALVES, f"input is {x.dtype}, not float16 or bfloat16")
    need(a["dst_type"] in (None, 1, torch.int8), f"the rig has no reference for dst_type {a['dst_type']}")
    need(a["smooth_scales"] is None and a["group_index"] is None, "the rig has no reference for smooth scales")
    scale = x.float().abs().amax(-1) / 127
    whole = torch.round(x.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    return whole.clamp(-128, 127).to(torch.int8), scale


def quant_matmul(a: dict[str, Any]) -> Tensor:
    """int8 [M, K] times int8 [K, N], scaled by column and row."""
    x, weight, scale, rows = a["x1"], a["x2"], a["scale"], a["pertoken_scale"]
    need(x.dtype == weight.dtype == torch.int8, f"x1 {x.dtype} and x2 {weight.dtype}, not int8")
    need(x.shape[-1] == weight.shape[0], f"x1 {tuple(x.shape)} and x2 {tuple(weight.shape)} do not fit")
    need(max(x.shape[-1], weight.shape[1]) <= 65535, "the last dimensions are at most 65535")
    out = dtype_of(a["output_dtype"])
    need(out in HALVES, f"output_dtype {out}: pass float16 or bfloat16 (the default is int8)")
    need(
        scale.dtype == torch.float32 if out == torch.float16 else scale.dtype in (torch.float32, torch.bfloat16),
        "scale",
    )
    need(scale.shape in ((1,), (weight.shape[1],)), f"scale {tuple(scale.shape)} for {weight.shape[1]} columns")
    need(a["offset"] is None, "offset goes with int8 outputs")
    total = x.double() @ weight.double() * scale.double()
    if rows is not None:
        need(rows.dtype == torch.float32 and len(rows) == len(x), "pertoken_scale is float32 [M]")
        total = total * rows.double()[:, None]
    return (total if a["bias"] is None else total + a["bias"].double()).to(out)


def dtype_of(value: Any) -> torch.dtype | None:
    """A dtype, or the number that torch gives it."""
    numbers = {5: torch.float16, 15: torch.bfloat16, 1: torch.int8, 6: torch.float32}
    return numbers.get(value) if isinstance(value, int) else value


def weight_quant_matmul(a: dict[str, Any]) -> Tensor:
    """npu_weight_quant_batchmatmul: x [M, K] times (weight + offset) * scale, by column or by group of rows."""
    x, packed, scale, offset = (a[name] for name in ("x", "weight", "antiquant_scale", "antiquant_offset"))
    need(x.dtype in HALVES, f"x is {x.dtype}, not float16 or bfloat16")
    need(scale.dtype == x.dtype and (offset is None or offset.dtype == x.dtype), "scale and offset have x's dtype")
    need(a["quant_scale"] is None, "the rig has no reference for a quantised output")
    weight = unpack(packed) if packed.dtype == torch.int32 else packed
    need(packed.dtype in (torch.int8, torch.int32), f"weight is {packed.dtype}, neither int8 nor int4 in int32")
    need(x.shape[-1] == weight.shape[0], f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    group = a["antiquant_group_size"]
    wide = weight.float()
    if group:
        need(group % 32 == 0 and 32 <= group < len(weight), f"group size {group}: a multiple of 32 below {len(weight)}")
        need(
            scale.shape == (-(-len(weight) // group), weight.shape[1]),
            f"scale {tuple(scale.shape)} for groups of {group}",
        )
        scale, offset = (None if s is None else s.repeat_interleave(group, 0)[: len(weight)] for s in (scale, offset))
    if offset is not None:
        wide = wide + offset.float()
    total = x.float() @ (wide * scale.float())
    bias = a["bias"]
    if bias is not None:
        need(
            bias.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype), f"bias {bias.dtype} with {x.dtype}"
        )
        total = total + bias.float()
    return total.to(x.dtype)


def to_int4(a: dict[str, Any]) -> Tensor:
    """npu_convert_weight_to_int4pack: int32 [K, N] of values -8 … 7 → int32 [K, N / 8], lowest nibble first."""
    weight = a["weight"]
    need(
        weight.dtype == torch.int32 and weight.dim() == 2,
        f"weight is {weight.dtype} {tuple(weight.shape)}, not int32 [K, N]",
    )
    need(weight.shape[1] % 8 == 0, f"{weight.shape[1]} columns, not a multiple of 8")
    need(int(weight.min()) >= -8 and int(weight.max()) <= 7, "values outside of -8 … 7")
    nibbles = (weight.long() & 15).view(len(weight), -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    nibbles = (packed.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    return torch.where(nibbles > 7, nibbles - 16, nibbles).flatten(1)
