"""The GPU's operations: Triton kernels, with cuBLAS for matrix products that none of them does faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anycore.contract import sampling
from anycore.contract.backend import Memory
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.ops import HeadNorms, Ops
from anycore.contract.rounded import RoundedCache
from anycore.contract.weights import DenseWeight, Weight
from anycore_cuda.kernels import attention as tiled
from anycore_cuda.kernels import decode as single
from anycore_cuda.kernels import edits, gated, masks, norm, pooling, products, quantised_linear, rotary, small_products
from anycore_cuda.kernels.launch import KNOWN, launch
from anycore_cuda.kernels.matvec import matvec, norm_matvec, suits
from anycore_cuda.kernels.prefix import prefix
from anycore_cuda.kernels.quantised import Packed, pack
from anycore_cuda.kernels.quantised_dense import dense_rows
from anycore_cuda.kernels.rounded_cache import parts
from anycore_cuda.kernels.sampling import choose, normaliser
from anycore_cuda.kernels.small_products import Parts
from anycore_cuda.plan import Plan, RoomyPlan

COUNTERS = 1 << 16
SAVED_TOKENS = 1 << 16
"""Keys that need not be read again for each request, at least: another launch and joining its results cost more."""


class CudaOps(Ops):
    def __init__(self, memory: Memory, processors: int, early: bool = False) -> None:
        self.memory = memory
        self.processors = processors
        self.early = early  # kernels start before the one ahead has ended (kernels/early.py)
        self.wide_products = hasattr(torch.ops.aten.mm, "dtype")  # a float32 result of 16-bit factors
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=memory.device)
        self.measured = KNOWN and processors == products.PROCESSORS and is_hopper(memory.device)
        self.chip = quantised_linear.chip_of(memory.device, processors, early)
        self.places = masks.Places()

    def plan(self, batch: Batch) -> Plan:
        return Plan(batch, self.memory, self.processors)

    def renewable(self, batch: Batch, decoding: int, prompts: int) -> RoomyPlan:
        return RoomyPlan(batch, decoding, prompts, self.memory, self.processors)

    def shares(self, batch: Batch) -> bool:
        return batch.shared_tokens * (len(batch.query_lens) - 1) >= SAVED_TOKENS

    def _plan(self, batch: Batch) -> Plan:
        return batch.plan if batch.plan is not None else self.plan(batch)

    def _shares(self, batch: Batch, window: int | None) -> bool:
        """Whether what requests share is read once for all, by a kernel that wants their heads prepared."""
        return window is None and self.shares(batch)

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
        if cache is not None:
            assert batch.slots is not None
            rotary.store(k, v, cache, batch.slots)
        return self._attend(q, k, v, cache, batch, scale, window, softcap)

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
        raw = None
        if self._plan(batch).decode_only and batch.slots is not None and not self._shares(batch, window):
            raw = single.Raw(norms, angles, batch.slots)
        else:
            rotary.prepare_heads(qkv, heads, kv_heads, angles, norms, cache, batch.slots, self.early)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        return self._attend(q, k, v, cache, batch, scale, window, softcap, raw)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor | RoundedCache | None,
        batch: Batch,
        scale: float,
        window: int | None,
        softcap: float | None,
        raw: single.Raw | None = None,
    ) -> Tensor:
        """Attend to a cache that already holds k and v unless they are `raw`, or to k and v themselves."""
        plan = self._plan(batch)
        out = q.new_empty(q.shape)
        heads, kv_heads = q.shape[1], k.shape[1]
        lens, tables = batch.seq_lens_device, batch.block_tables
        if cache is not None and tables is not None:
            if plan.decode_only:
                shared = None
                if self._shares(batch, window):
                    shared = prefix(
                        q, cache, tables, batch.shared_tokens_device, scale, softcap, self.processors, early=self.early
                    )
                splits = plan.splits(len(q), kv_heads)
                single.decode(
                    q, cache, out, tables, lens, self.counters, splits, scale, window, softcap,
                    batch.order, prefix=shared, raw=raw, early=self.early,
                )  # fmt: skip
                return out
            if plan.decoding is not None:
                splits = plan.splits(len(plan.decoding), kv_heads)
                single.decode(
                    q, cache, out, tables, lens, self.counters, splits, scale, window, softcap,
                    plan.decoding, batch.query_starts_device, early=self.early,
                )  # fmt: skip
        data, scales, kind = parts(cache)
        # A fresh prompt's keys and values are at hand, but what is rounded is read as others will read it.
        paged = None if cache is None or (plan.fresh and not kind) else tables
        if paged is not None:
            k, v = data[0], data[1]
        rows = tiled.tile_rows(heads // kv_heads, q.shape[2], q.element_size(), paged is not None)
        tiles = plan.tiles(rows // (heads // kv_heads))
        if tiles is not None:
            tiled.attend(
                q, k, v, out, tiles, rows, batch.query_starts_device, lens, paged,
                batch.causal, scale, window, softcap, scales=scales if kind else None, kind=kind,
            )  # fmt: skip
        return out

    def rms_norm(
        self, x: Tensor | Parts, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(x, Parts) and launch.rehearses("parts", x.sums.shape[2], x.width, x.dtype, residual is None):
            for other in small_products.rehearsed_parts(x):
                norm.rms_norm(other, weight, eps, residual, self.early)
        return norm.rms_norm(x, weight, eps, residual, self.early)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return norm.layer_norm(x, weight, bias, eps, residual, self.early)

    def pool(self, rows: Tensor, batch: Batch, kind: str) -> Tensor:
        if kind == "mean":
            return pooling.mean(rows, batch.query_starts_device)
        return super().pool(rows, batch, kind)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        return gated.gated(x, kind, self.early)

    def pack(self, weight: Weight) -> Tensor | Packed:
        return weight.dense() if isinstance(weight, DenseWeight) else pack(weight, self.chip.e4m3)

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        return dense_rows(table, ids=ids) if isinstance(table, Packed) else super().embedding(ids, table)

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, Packed):
            return quantised_linear.linear(x, handle, bias, self.chip)
        if suits(x, handle):
            return matvec(x, handle, bias, early=self.early)
        shape = self._shape(x, handle)
        if shape is not None:
            return products.product(x, handle, shape, self.counters, bias, early=self.early)
        small = self._small_product(x, handle, bias)
        if small is not None:
            return small
        if self._ours(x, handle, 255) and products.deep(len(handle), handle.shape[1], len(x)):
            with products.by_cublaslt():
                return super().linear(x, handle, bias)
        return super().linear(x, handle, bias)

    def _ours(self, x: Tensor, handle: Any, most: int) -> bool:
        """Whether kernels that were measured here may multiply them: with more rows nobody looks further."""
        return self.measured and len(x) <= most and products.fits(x, handle)

    def _shape(self, x: Tensor, handle: Any, gate: str | None = None) -> products.Shape | None:
        """How a kernel of ours multiplies them, where that was measured to be faster than cuBLAS."""
        if not self._ours(x, handle, products.MOST_ROWS):
            return None
        return products.variant_of(len(handle), handle.shape[1], len(x), gate is not None)

    def _small_product(self, x: Tensor, handle: Any, bias: Tensor | None, gate: str | None = None) -> Tensor | None:
        """The product with a small matrix, where that was measured to be faster than cuBLAS."""
        if not self._ours(x, handle, small_products.MOST_ROWS):
            return None
        outs, width = handle.shape
        if launch.rehearses("small", outs, width, x.dtype, bias is None, gate):
            for rows in small_products.VARIANTS:  # prompts may have any number of rows
                self._small_product(x.new_empty(rows, width), handle, bias, gate)
        shape = small_products.shape_of(outs, width, len(x), gate is not None)
        return None if shape is None else small_products.product(x, handle, shape, bias, gate, self.early)

    def linear_for_norm(self, x: Tensor, handle: Any) -> Tensor | Parts:
        if not self._ours(x, handle, small_products.MOST_ROWS):
            return self.linear(x, handle)
        outs, width = handle.shape
        if launch.rehearses("for norm", outs, width, x.dtype):
            for rows in small_products.VARIANTS:
                self.linear_for_norm(x.new_empty(rows, width), handle)
        shape = small_products.parts_shape_of(outs, width, len(x))
        return self.linear(x, handle) if shape is None else small_products.parts(x, handle, shape, self.early)

    def norm_linear(
        self,
        x: Tensor | Parts,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        handle: Any,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(x, Parts):
            if isinstance(handle, Packed):
                return quantised_linear.norm_linear(x, residual, weight, eps, handle, bias, gate, self.chip)
            if suits(x, handle):
                return norm_matvec(x, residual, weight, eps, handle, bias, gate, early=self.early)
        normed, total = self.rms_norm(x, weight, eps, residual)
        if gate is None:
            return self.linear(normed, handle, bias), total
        shape = self._shape(normed, handle, gate)
        if shape is not None:
            return products.product(normed, handle, shape, self.counters, bias, gate, early=self.early), total
        small = self._small_product(normed, handle, bias, gate)
        return self.gated(self.linear(normed, handle, bias), gate) if small is None else small, total

    def logits(self, x: Tensor, handle: Any) -> Tensor:
        if isinstance(handle, Packed):
            return quantised_linear.linear(x, handle, None, self.chip, torch.float32)
        if suits(x, handle):
            return matvec(x, handle, dtype=torch.float32, early=self.early)
        if x.dtype == torch.float32 or not self.wide_products:
            return super().logits(x, handle)
        shape = self._shape(x, handle)
        if shape is not None:
            return products.product(x, handle, shape, self.counters, dtype=torch.float32, early=self.early)
        return torch.mm(x, handle.t(), out_dtype=torch.float32)

    def sample(self, logits: Tensor, params: Sampling) -> Samples:
        raw = sampling.raw_of(logits, params)
        finite: Tensor | None = None
        placed: tuple[Tensor, Tensor] | None = None
        others = (params.penalties, params.bias, params.banned)
        if params.masked is not None and all(edit is None for edit in others):
            placed = self.places.of(params.masked[0], len(logits)), params.masked[1]
        elif params.edited:
            finite = sampling.row_is_finite(logits)
            if params.penalties is not None:
                edits.penalise(logits, params.penalties)
            if params.bias is not None:
                edits.add(logits, *params.bias)
            if params.banned is not None:
                edits.ban(logits, *params.banned)
            if params.masked is not None:
                masks.constrain(logits, *params.masked)
        filters = (None, None, None) if params.all_greedy else (params.top_k, params.top_p, params.min_p)
        both, fine = choose(logits, params.temperature, params.uniforms, *filters, self.early, placed)
        ids, alone = both[0], finite is None and raw is None
        samples = Samples(ids, fine if finite is None else finite, together=both if alone else None)
        if raw is not None and params.logprobs is not None:
            report = sampling.report(raw, ids, params.logprobs, normaliser(raw))
            samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs = report
        return samples


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
