"""The CPU's operations where our own kernels run; what they do not cover stays with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.formats import Format
from anycore.contract.ops import HeadNorms
from anycore.contract.weights import DenseWeight, Int8Weight, Weight
from anycore_cpu.kernels import edits, ends, quantised, reports
from anycore_cpu.kernels.attention import DTYPES, KernelPlan
from anycore_cpu.kernels.library import Kernels, PackedMatrix
from anycore_cpu.kernels.quantised import QuantisedMatrix
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

    def quantise(self, weight: Tensor, wanted: Format) -> Int8Weight | None:
        if wanted.kind != "int8" or weight.dtype not in DTYPES:
            return None
        return quantised.rounded(self.kernels, weight, wanted)

    def pack(self, weight: Weight) -> Tensor | PackedMatrix | QuantisedMatrix:
        if quantised.packable(weight):
            return quantised.pack(self.kernels, weight)
        data = weight.dense()
        # What is not dense may be a table, too, and those are read by rows.
        return self.kernels.pack(data) if isinstance(weight, DenseWeight) and data.dtype in DTYPES else data

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, PackedMatrix):
            return self.kernels.linear(x, handle, bias)
        if isinstance(handle, QuantisedMatrix):
            return quantised.linear(self.kernels, x, handle, bias)
        return super().linear(x, handle, bias)

    def logits(self, x: Tensor, handle: Any) -> Tensor:
        if isinstance(handle, PackedMatrix):
            return self.kernels.linear(x, handle, None, wide=True)
        if isinstance(handle, QuantisedMatrix):
            return quantised.linear(self.kernels, x, handle, None, wide=True)
        return super().logits(x, handle)

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        if isinstance(table, QuantisedMatrix):
            return quantised.embedding(self.kernels, ids, table)
        return ends.gather(self.kernels, [(ids, table)]) if has_rows(table) else super().embedding(ids, table)

    def embedding_sum(self, parts: Sequence[tuple[Tensor | None, Any]], scale: float = 1.0) -> Tensor:
        if all(has_rows(table) for _, table in parts):
            return ends.gather(self.kernels, parts, scale)
        return super().embedding_sum(parts, scale)

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return ends.angles(self.kernels, positions, frequencies, scale)

    def wanted(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.output_rows is None:
            return x
        return ends.gather(self.kernels, [(batch.output_rows, x.contiguous())])

    def pool(self, rows: Tensor, batch: Batch, kind: str) -> Tensor:
        return ends.pool(self.kernels, rows, batch.query_starts_device, kind)

    def sample(self, logits: Tensor, params: Sampling) -> Samples:
        logits = logits.contiguous()
        asking = params.reported
        raw, rows = logits, asking  # what log-probabilities are of: kept beside the logits where these are edited
        if params.logprobs is not None and params.edited:
            every = torch.arange(len(logits)) if asking is None else asking
            raw, rows = ends.gather(self.kernels, [(every, logits)]), None
        self._edit(logits, params)
        samples = Samples(*ends.choose(self.kernels, logits, params))
        if params.logprobs is not None:
            ids = samples.ids if asking is None else samples.ids[asking]
            found = reports.report(self.kernels, raw, ids, params.logprobs, rows)
            if asking is not None:
                found = reports.spread(found, asking, len(logits))
            samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs = found
        return samples

    def report(self, raw: Tensor, ids: Tensor, count: int) -> reports.Report:
        return reports.report(self.kernels, raw, ids, count)

    def logprobs(self, raw: Tensor, ids: Tensor) -> Tensor:
        return reports.named(self.kernels, raw, ids)

    def _edit(self, logits: Tensor, params: Sampling) -> None:
        """Penalties, biases, bans and masks, in place."""
        if params.penalties is not None:
            edits.penalise(self.kernels, logits, params.penalties)
        if params.bias is not None:
            edits.add(self.kernels, logits, *params.bias)
        if params.banned is not None:
            edits.ban(self.kernels, logits, *params.banned)
        if params.masked is not None:
            edits.mask(self.kernels, logits, *params.masked)

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


def has_rows(table: Any) -> bool:
    """Whether the kernels read rows of a table."""
    return isinstance(table, QuantisedMatrix) or (isinstance(table, Tensor) and table.dtype in DTYPES)
