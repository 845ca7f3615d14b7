"""The NPU's operations: CANN's fused operators through torch_npu, torch's own for everything else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.contract.reference import padded_attention
from anycore.contract.weights import DenseWeight, Weight
from anycore_ascend import quantised

log = logging.getLogger(__name__)

MASK = 2048
"""Side of the one mask that the attention operators take, however long the requests are. 1 means hidden."""

HALVES = (torch.bfloat16, torch.float16)
MOST_REQUESTS = 1024
"""Requests in one call of the encoders' operator."""


@dataclass
class Plan:
    """Lengths as the attention operator wants them: on the host, rows summed up, tokens for each request."""

    ends: list[int]
    lens: list[int]


def operator(name: str) -> Any | None:
    """An operator of torch_npu's; None where the installed release does not have it."""
    return getattr(getattr(torch.ops.npu, name, None), "default", None)


class AscendOps(Ops):
    draw_dtype = torch.float32

    def __init__(self, memory: Memory) -> None:
        self.fallbacks: dict[str, int] = {}
        self.scatter: Any = operator("npu_scatter_pa_kv_cache")  # not in torch_npu before 7.2.0
        named = self.scatter and any(argument.name == "cache_mode" for argument in self.scatter._schema.arguments)
        self.form = {"cache_mode": "Norm"} if named else {}  # since 26.0.0 a layout in tiles is the default
        self.fused: Any = operator("npu_fused_infer_attention_score")
        self.varlen: Any = operator("npu_fusion_attention")
        above = torch.ones(MASK, MASK, dtype=torch.int8).triu(1)
        self.mask, self.bool_mask = memory.upload(above), memory.upload(above.bool())
        self._gammas: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor | None]] = {}
        self._angles: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._try_varlen(memory.upload(torch.ones(2, 1, 64, dtype=torch.float16)))

    def _try_varlen(self, x: Tensor) -> None:
        """CANN's documentation lists the encoders' operator for training products only; others may refuse it."""
        try:
            self.varlen(x, x, x, 1, "TND", actual_seq_qlen=[2], actual_seq_kvlen=[2])
        except RuntimeError as error:
            log.warning("npu_fusion_attention is refused, encoders take torch's attention: %s", error)
            self.varlen = None

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
        self._store(k, v, keys, values, batch.slots)
        band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
        out: Tensor = self.fused(
            q, keys.flatten(2), values.flatten(2), input_layout="TND", scale=scale,
            atten_mask=self.mask, sparse_mode=3 if window is None else 4, **band,
            num_heads=q.shape[1], num_key_value_heads=k.shape[1],
            block_table=batch.block_tables, block_size=keys.shape[1],
            actual_seq_lengths=plan.ends, actual_seq_lengths_kv=plan.lens,
        )[0]  # fmt: skip
        return out

    def _store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Slots are in range and none appears twice, as the operators ask."""
        if self.scatter is not None:
            self.scatter(k, v, keys, values, slots, **self.form)
            return
        for rows, cache in ((k, keys), (v, values)):
            torch.ops.npu.npu_scatter_nd_update_(cache.flatten(0, 1), slots[:, None], rows)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Within each request's own rows. The operator above has answered calls without a mask by averages."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        ends = batch.query_starts[1:]
        if softcap is not None:
            self._count("attention with a soft cap")
            return super().attention(q, k, v, None, batch, scale, window, softcap)
        if self.varlen is None or len(ends) > MOST_REQUESTS:
            self._count("npu_fusion_attention")
            batch.padding = len(ends) * max(batch.query_lens) - sum(batch.query_lens)
            return padded_attention(q, k, v, batch, scale, window)
        shape: dict[str, Any] = {}
        if window is not None:
            after = 0 if batch.causal else window - 1
            shape = {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": after, "atten_mask": self.bool_mask}
        elif batch.causal:
            shape = {"sparse_mode": 3, "atten_mask": self.bool_mask}
        shape |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "scale": scale}
        out: Tensor = self.varlen(q, k, v, q.shape[1], "TND", **shape)[0]
        return out

    def _count(self, what: str) -> None:
        self.fallbacks[what] = self.fallbacks.get(what, 0) + 1

    # --- products ------------------------------------------------------------------------------------------------

    def pack(self, weight: Weight) -> Any:
        return weight.dense() if isinstance(weight, DenseWeight) else quantised.pack(weight)

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, Tensor):
            return super().linear(x, handle, bias)
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = handle(rows) if len(rows) else x.new_empty(0, handle.outputs)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias

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
        if (id(weight), dtype) not in self._gammas:
            rounded = weight.to(dtype)
            exact = torch.equal(rounded.float(), weight)
            self._gammas[id(weight), dtype] = weight, rounded if exact else None  # the weight, so that its id stays
        return self._gammas[id(weight), dtype][1]

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In float32: the operator takes angles in the operand's type, and rounded angles cost digits."""
        if q.numel() == 0:
            return super().rotary(q, k, cos, sin)
        if self._angles is None or self._angles[0] is not cos or self._angles[1] is not sin:
            whole = [torch.cat((x, x), dim=-1)[None, :, None] for x in (cos, sin)]
            self._angles = cos, sin, whole[0], whole[1]
        _, _, cosines, sines = self._angles
        turn = torch.ops.npu.npu_rotary_mul
        q, k = (turn(x.float().contiguous()[None], cosines, sines)[0].to(x.dtype) for x in (q, k))
        return q, k

    def gated(self, x: Tensor, kind: str) -> Tensor:
        if kind != "silu" or x.numel() == 0:
            return super().gated(x, kind)
        out: Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), -1)
        return out
