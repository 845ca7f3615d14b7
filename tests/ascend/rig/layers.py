"""References of norms, activations and rotations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rig.limits import need

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return normed(a["input"], a["gamma"], a["epsilon"])


def normed(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    need(x.dtype in FLOATS, f"input is {x.dtype}")
    need(gamma.dtype in (x.dtype, torch.float32), f"gamma is {gamma.dtype}, neither {x.dtype} nor float32")
    need(gamma.shape == x.shape[-gamma.dim() :], f"gamma {tuple(gamma.shape)} for input {tuple(x.shape)}")
    need(x.numel() > 0, "the input is empty")
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(x.dtype), scale


def add_rms_norm(a: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, 1 / root mean square, x1 + x2)."""
    first, second, gamma = a["x1"], a["x2"], a["gamma"]
    need(
        first.dtype == second.dtype == gamma.dtype,
        f"x1 {first.dtype}, x2 {second.dtype} and gamma {gamma.dtype} differ",
    )
    need(first.shape == second.shape, f"x1 {tuple(first.shape)} and x2 {tuple(second.shape)} differ")
    total = first + second
    return (*normed(total, gamma, a["epsilon"]), total)


def swiglu(a: dict[str, Any]) -> Tensor:
    x = a["input"]
    need(x.is_contiguous() and x.numel() > 0, "the input must be contiguous and not empty")
    need(x.shape[a["dim"]] % 2 == 0, f"input {tuple(x.shape)} cannot be halved")
    gate, up = x.float().chunk(2, a["dim"])
    return (F.silu(gate) * up).to(x.dtype)


def rotary_mul(a: dict[str, Any]) -> Tensor:
    """x * r1 + rotated(x) * r2, where r1 and r2 span the whole head."""
    x, cos, sin = a["input"], a["r1"], a["r2"]
    need(a["rotate"] is None if "rotate" in a else True, "the rig has no reference for a rotation matrix")
    need(
        x.dim() in (3, 4) and cos.dim() == x.dim() and cos.shape == sin.shape, "input, r1 and r2 have 3 or 4 dimensions"
    )
    need(cos.shape[-1] == x.shape[-1], f"r1 spans {cos.shape[-1]} of a head of {x.shape[-1]}")
    need(x.shape[-1] % 2 == 0 and x.shape[-1] < 896, f"head size {x.shape[-1]} is odd or 896 and more")
    need(x.dtype == cos.dtype == sin.dtype, f"input {x.dtype}, r1 {cos.dtype} and r2 {sin.dtype} differ")
    need(a["rotary_mode"] == "half", f"the rig has no reference for rotary_mode {a['rotary_mode']}")
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()).to(x.dtype)


def apply_rotary(a: dict[str, Any]) -> None:
    """npu_apply_rotary_pos_emb: query and key are overwritten."""
    q, k, cos, sin = (a[name] for name in ("query", "key", "cos", "sin"))
    need(a["layout"] in ("BSND", "TND") and a["rotary_mode"] == "half", "layouts BSND and TND, mode half")
    need(q.shape[-1] in (64, 128), f"head size {q.shape[-1]}, not 64 or 128")
    for x in (q, k):
        x.copy_(rotary_mul({"input": x, "r1": cos, "r2": sin, "rotary_mode": "half"}))
