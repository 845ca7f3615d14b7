"""The pieces that decoders and encoders are made of: finished weights and the operations that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import HeadNorms, Ops
from anycore.contract.weights import QuantisedWeight
from anycore.models.spec import DenseSpec, ModelSpec

Weights = Mapping[str, Any]
"""Finished parameters by name: matrices as the handles of `ops.pack` or as Pieces, everything else as tensors, and
tables that are quantised as weights not packed yet."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A matrix whose rows are held in several formats, or whose columns stand in another order.

    Each piece is a handle of `ops.pack`, the order in which it takes the columns of what it is multiplied by, and how
    many rows it has.
    """

    parts: tuple[tuple[Any, Tensor | None, int], ...]

    def multiply(self, ops: Ops, x: Tensor, bias: Tensor | None) -> Tensor:
        found, start = [], 0
        for handle, order, rows in self.parts:
            own = None if bias is None else bias[start : start + rows]
            found.append(ops.linear(x if order is None else x.index_select(-1, order), handle, own))
            start += rows
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class Linear:
    """x @ weight.T + bias."""

    def __init__(self, ops: Ops, weights: Weights, name: str) -> None:
        self.ops = ops
        self.handle = weights[f"{name}.weight"]
        self.bias: Tensor | None = weights.get(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.handle, Pieces):
            return self.handle.multiply(self.ops, x, self.bias)
        return self.ops.linear(x, self.handle, self.bias)

    def before_norm(self, x: Tensor) -> Any:
        """The same, where nothing but an RMS norm takes the result."""
        if isinstance(self.handle, Pieces) or self.bias is not None:
            return self(x)
        return self.ops.linear_for_norm(x, self.handle)


class Embedding:
    """Rows of a table by token id."""

    def __init__(self, ops: Ops, table: Any) -> None:
        self.ops = ops
        self.table = table

    def __call__(self, ids: Tensor, others: Sequence[tuple[Tensor | None, Any]] = (), scale: float = 1.0) -> Tensor:
        """[T] int64 → [T, H]: `scale` times the sum of these rows and of those of other tables."""
        return self.ops.embedding_sum([(ids, self.table), *others], scale)


class Head:
    """The language-model head."""

    def __init__(self, ops: Ops, handle: Any) -> None:
        self.ops = ops
        self.handle = handle

    def __call__(self, rows: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        return self.ops.logits(rows, self.handle)


def packed_table(weight: Tensor | QuantisedWeight, ops: Ops) -> Any:
    """A table as `ops.embedding` takes it: dense, or the handle of a quantised one."""
    return weight if isinstance(weight, Tensor) else ops.pack(weight)


class RMSNorm:
    """Returns (normed, x + residual). Gemma stores its weights as w - 1."""

    def __init__(self, ops: Ops, weights: Weights, name: str, spec: ModelSpec) -> None:
        self.ops = ops
        self.eps = spec.norm_eps
        weight: Tensor = weights[f"{name}.weight"]
        self.weight = weight + 1.0 if spec.norm_offset else weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.ops.rms_norm(x, self.weight, self.eps, residual)


class NormLinear:
    """A norm, the matrix behind it and perhaps a gate: what a half of a decoder's layer begins with."""

    def __init__(self, norm: RMSNorm, linear: Linear, gate: str | None = None) -> None:
        self.norm = norm
        self.linear = linear
        self.gate = gate

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        norm, linear = self.norm, self.linear
        if isinstance(linear.handle, Pieces):
            normed, total = norm(x, residual)
            out = linear(normed)
            return (out if self.gate is None else norm.ops.gated(out, self.gate)), total
        return norm.ops.norm_linear(x, residual, norm.weight, norm.eps, linear.handle, linear.bias, self.gate)


class LayerNorm:
    """Returns (normed, x + residual)."""

    def __init__(self, ops: Ops, weights: Weights, name: str, spec: ModelSpec) -> None:
        self.ops = ops
        self.eps = spec.norm_eps
        self.weight: Tensor = weights[f"{name}.weight"]
        self.bias: Tensor = weights[f"{name}.bias"]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps, residual)


class Attention:
    """What stands between the projection to q, k and v and the one back: head norms, rotation, attention."""

    def __init__(self, ops: Ops, weights: Weights, spec: ModelSpec, index: int, scope: str) -> None:
        self.ops = ops
        self.index = index
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.window = spec.windows[index] if spec.windows else None
        self.softcap = spec.softcap
        self.norms: HeadNorms | None = None
        if spec.qk_norm:
            q_norm, k_norm = (RMSNorm(ops, weights, f"{scope}.{name}", spec) for name in ("q_norm", "k_norm"))
            self.norms = q_norm.weight, k_norm.weight, spec.norm_eps

    def __call__(self, qkv: Tensor, batch: Batch, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[T, (Hq + 2 Hkv) D] → [T, Hq D]. `angles` are cos and sin [T, D/2]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        cache = None if batch.kv is None else batch.kv[self.index]
        attended = self.ops.self_attention(
            heads, self.heads, self.kv_heads, self.norms, angles, cache, batch, self.scale, self.window, self.softcap
        )
        return attended.flatten(1)


class Dense:
    """A sentence-transformers Dense module on pooled vectors, in float32."""

    def __init__(self, ops: Ops, weights: Weights, spec: DenseSpec) -> None:
        self.ops = ops
        self.linear = Linear(ops, weights, "linear")
        self.kind = spec.activation

    def __call__(self, vectors: Tensor) -> Tensor:
        """[B, in] float32 → [B, out]."""
        out = self.linear(vectors)
        if self.kind == "identity":
            return out
        return out.tanh() if self.kind == "tanh" else self.ops.activation(out, self.kind)


def project(vectors: Tensor, dense: list[Dense]) -> Tensor:
    """[B, H] float32 → [B, D]: pooled vectors through the Dense modules, if there are any."""
    for module in dense:
        vectors = module(vectors)
    return vectors
