"""The pieces that decoders and encoders are made of: finished weights and the operations that use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import HeadNorms, Ops
from anycore.models.spec import DenseSpec, ModelSpec

Weights = Mapping[str, Any]
"""Finished parameters by name: matrices as the handles of `ops.pack`, everything else as tensors."""


class Linear:
    """x @ weight.T + bias."""

    def __init__(self, ops: Ops, weights: Weights, name: str) -> None:
        self.ops = ops
        self.handle = weights[f"{name}.weight"]
        self.bias: Tensor | None = weights.get(f"{name}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.handle, self.bias)


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
