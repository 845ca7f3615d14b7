"""The CPU's operations where our own kernels run; what they do not cover stays with torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import HeadNorms
from anycore.contract.weights import Weight
from anycore_cpu.kernels.attention import DTYPES, KernelPlan
from anycore_cpu.kernels.library import Kernels, PackedMatrix
from anycore_cpu.ops import CpuOps


class KernelOps(CpuOps):
    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def plan(self, batch: Batch) -> KernelPlan:
        return KernelPlan(batch)

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
        plan = batch.plan if batch.plan is not None else self.plan(batch)
        return self.kernels.attend(plan, q, k, v, cache, scale, window, softcap)

    def self_attention(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norms: HeadNorms | None,
        angles: tuple[Tensor, Tensor] | None,
        cache: Any,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        plan = batch.plan if batch.plan is not None else self.plan(batch)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        return self.kernels.attend(plan, q, k, v, cache, scale, window, softcap, norms, angles)

    def pack(self, weight: Weight) -> Tensor | PackedMatrix:
        data = weight.dense()
        return self.kernels.pack(data) if data.dtype in DTYPES else data

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, PackedMatrix):
            return self.kernels.linear(x, handle, bias)
        return super().linear(x, handle, bias)

    def logits(self, x: Tensor, handle: Any) -> Tensor:
        if isinstance(handle, PackedMatrix):
            return self.kernels.linear(x, handle, None, wide=True)
        return super().logits(x, handle)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.norm(x, residual, weight, None, eps, centred=False)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.norm(x, residual, weight, bias, eps, centred=True)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        return self.kernels.activation(x, kind, gated=True)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return self.kernels.activation(x, kind, gated=False)
