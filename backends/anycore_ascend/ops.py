"""The NPU's operations: CANN's fused operators through torch_npu, torch's own for everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.contract.weights import Int4Weight, Int8Weight, Weight
from anycore_ascend.calls import Store, operator
from anycore_ascend.padding import padded_attention
from anycore_ascend.quantised import pack_int4, pack_int8

MASK = 2048
"""Side of the one mask that the attention operators take, however long the requests are. 1 means hidden."""

EVERYTHING = 2**31 - 1
HALVES = (torch.bfloat16, torch.float16)
MOST_REQUESTS = 1024
"""Requests in one call of the encoders' operator."""


@dataclass
class Plan:
    """Lengths as the attention operator wants them: on the host, rows summed up, tokens for each request."""

    ends: list[int]
    lens: list[int]


class AscendOps(Ops):
    draw_dtype = torch.float32

    def __init__(self, memory: Memory, fallbacks: dict[str, int]) -> None:
        self.memory = memory
        self.fallbacks = fallbacks
        self.store = Store()
        self.fused: Any = operator("npu_fused_infer_attention_score")
        self.varlen: Any = operator("npu_fusion_attention")
        above = torch.ones(MASK, MASK, dtype=torch.int8).triu(1)
        self.mask = memory.upload(above)
        self.bool_mask = memory.upload(above.bool())
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._angles: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def plan(self, batch: Batch) -> Plan:
        return Plan(batch.query_starts[1:], batch.seq_lens)

    # --- attention -----------------------------------------------------------------------------------------------

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
        if cache is None:
            return self._packed(q, k, v, batch, scale, window, softcap)
        size, wide = q.shape[2], cache.shape[-1]
        q, k, v = (F.pad(x, (0, wide - size)) if wide > size else x.contiguous() for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        if q.dtype in HALVES and wide in (64, 128) and softcap is None and batch.causal and group <= 64:
            out = self._paged(q, k, v, cache, batch, scale, window)
        else:
            self._count(f"paged attention in {q.dtype}, head size {size}{', soft cap' if softcap else ''}")
            out = super().attention(q, k, v, cache, batch, scale, window, softcap)
        return out[..., :size]

    def _paged(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Prompts, parts of prompts, requests that continue a cached prefix and decoding ones: one call for all.

        Modes 3 and 4 let the last row of a request see its last token; mode 4 adds a lower edge.
        """
        assert batch.slots is not None
        plan: Plan = batch.plan if batch.plan is not None else self.plan(batch)
        keys, values = cache[0], cache[1]
        self.store(k, v, keys, values, batch.slots)
        band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
        out: Tensor = self.fused(
            q,
            keys.flatten(2),
            values.flatten(2),
            atten_mask=self.mask,
            block_table=batch.block_tables,
            actual_seq_lengths=plan.ends,
            actual_seq_lengths_kv=plan.lens,
            num_heads=q.shape[1],
            num_key_value_heads=k.shape[1],
            scale=scale,
            input_layout="TND",
            block_size=keys.shape[1],
            sparse_mode=3 if window is None else 4,
            **band,
        )[0]
        return out

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Within each request's own rows. Not through the fused operator of above: it has answered calls without a
        mask by averages.
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ends = batch.query_starts[1:]
        if softcap is not None:
            self._count("attention with a soft cap")
            return super().attention(q, k, v, None, batch, scale, window, softcap)
        if self.varlen is None or len(ends) > MOST_REQUESTS:
            self._count("npu_fusion_attention")
            return padded_attention(q, k, v, batch, scale, window)
        shape: dict[str, Any] = {}
        if window is not None:
            after = 0 if batch.causal else window - 1
            shape = {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": after, "atten_mask": self.bool_mask}
        elif batch.causal:
            shape = {"sparse_mode": 3, "atten_mask": self.bool_mask}
        out: Tensor = self.varlen(
            q, k, v, q.shape[1], "TND", scale=scale, actual_seq_qlen=ends, actual_seq_kvlen=ends, **shape
        )[0]
        return out

    # --- products ------------------------------------------------------------------------------------------------

    def pack(self, weight: Weight) -> Any:
        handle: Any = None
        if isinstance(weight, Int8Weight):
            handle = pack_int8(weight)
        elif isinstance(weight, Int4Weight):
            handle = pack_int4(weight)
        return weight.dense() if handle is None else handle

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, Tensor):
            return super().linear(x, handle, bias)
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = handle(rows) if len(rows) else x.new_empty(0, handle.scale.shape[-1])
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias

    def _count(self, what: str) -> None:
        self.fallbacks[what] = self.fallbacks.get(what, 0) + 1

    # --- norms, rotation, activation -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if x.numel() == 0:  # CANN refuses empty tensors
            return super().rms_norm(x, weight, eps, residual)
        x = x.contiguous()
        gamma = self._gamma(weight, x.dtype)
        if gamma is not None and residual is not None:
            normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual.contiguous(), gamma, eps)
            return normed, total
        total = x if residual is None else x + residual
        if gamma is not None:
            return torch.ops.npu.npu_rms_norm(total, gamma, eps)[0], total
        return torch.ops.npu.npu_rms_norm(total.float(), weight, eps)[0].to(x.dtype), total

    def _gamma(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The weight in the operand's type, which CANN wants; None where it does not survive the rounding, as 1 + w."""
        if weight.dtype == dtype:
            return weight
        known = self._weights.get(id(weight))
        if known is None or known[0] is not weight or (known[1] is not None and known[1].dtype != dtype):
            rounded = weight.to(dtype)
            known = weight, rounded if torch.equal(rounded.float(), weight) else None
            self._weights[id(weight)] = known
        return known[1]

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In float32: the operator takes angles in the operand's type, and rounded angles cost digits."""
        if q.numel() == 0:
            return super().rotary(q, k, cos, sin)
        if self._angles is None or self._angles[0] is not cos or self._angles[1] is not sin:
            whole = [torch.cat((x, x), dim=-1)[None, :, None] for x in (cos, sin)]
            self._angles = cos, sin, whole[0], whole[1]
        _, _, cosines, sines = self._angles
        turned = [
            torch.ops.npu.npu_rotary_mul(x.float().contiguous()[None], cosines, sines)[0].to(x.dtype) for x in (q, k)
        ]
        return turned[0], turned[1]

    def gated(self, x: Tensor, kind: str) -> Tensor:
        if kind != "silu" or x.numel() == 0:
            return super().gated(x, kind)
        out: Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), -1)
        return out
