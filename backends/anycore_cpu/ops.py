"""The CPU's operations: packed weights, planned attention, and fewer torch calls a layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.contract.rounded import RoundedCache
from anycore.contract.weights import DenseWeight, Weight
from anycore_cpu import packed
from anycore_cpu.attention import Plan, attend

PACKED_DTYPES = (torch.bfloat16,)
"""float32 stays as it is: for one row MKL is a quarter faster than oneDNN, for many rows as fast (measured)."""


class CpuOps(Ops):
    def __init__(self) -> None:
        self.packs = {dtype for dtype in PACKED_DTYPES if packed.usable(dtype)}

    def plan(self, batch: Batch) -> Any:
        return Plan(batch)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if softcap is not None or isinstance(cache, RoundedCache):  # torch's kernel has no place for either
            return super().attention(q, k, v, cache, batch, scale, window, softcap)
        plan = batch.plan if batch.plan is not None else self.plan(batch)
        return attend(plan, q, k, v, cache, scale, window)

    def pack(self, weight: Weight) -> Any:
        data = weight.dense()
        # What is not dense may be a table, too, and those are read by rows.
        return packed.reorder(data) if isinstance(weight, DenseWeight) and data.dtype in self.packs else data

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if handle.is_mkldnn:
            return packed.linear(x, handle, bias)
        return super().linear(x, handle, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return torch.mul(x, scale).mul_(weight).to(x.dtype), x

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        # torch takes a low-precision x with a float32 weight and bias, and computes in float32.
        return F.layer_norm(x, weight.shape, weight, bias, eps), x

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if neighbours(q, k):
            heads, kv_heads = q.shape[1], k.shape[1]
            both = q.as_strided((len(q), heads + kv_heads, q.shape[2]), q.stride())
            q, k = torch.split(rotate(both, cos, sin), [heads, kv_heads], dim=1)
            return q, k
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate, kind).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`contract.reference.rotate` in fewer passes: the halves are a dimension of their own."""
    rows, heads, dim = x.shape
    pairs = x.float().view(rows, heads, 2, dim // 2)
    out = pairs * cos[:, None, None]
    sin = sin[:, None]
    out[:, :, 0].addcmul_(pairs[:, :, 1], sin, value=-1)
    out[:, :, 1].addcmul_(pairs[:, :, 0], sin)
    return out.view(rows, heads, dim).to(x.dtype)


def neighbours(q: Tensor, k: Tensor) -> bool:
    """Whether k's heads follow q's in one matrix, as a fused projection leaves them."""
    return (
        q.stride() == k.stride()
        and k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1)
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )
