"""The pieces that decoders and encoders are made of: finished weights and the operations that use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.models.spec import DenseSpec, ModelSpec, RopeSpec

Weights = Mapping[str, Any]
"""Finished parameters by name: matrices as the handles of `ops.pack`, everything else as tensors."""

TWO_PI = 2 * math.pi


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
    """One fused projection to q, k and v, optional head norms and rotation, attention, and the way back."""

    def __init__(self, ops: Ops, weights: Weights, spec: ModelSpec, index: int, qkv: str, out: str) -> None:
        self.ops = ops
        self.index = index
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.window = spec.windows[index] if spec.windows else None
        self.softcap = spec.softcap
        self.qkv = Linear(ops, weights, qkv)
        self.out = Linear(ops, weights, out)
        self.norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm:
            scope = qkv.rsplit(".", 1)[0]
            self.norms = RMSNorm(ops, weights, f"{scope}.q_norm", spec), RMSNorm(ops, weights, f"{scope}.k_norm", spec)

    def __call__(self, x: Tensor, batch: Batch, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """[T, H] → [T, H]. `angles` are cos and sin [T, D/2]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.norms is not None:
            q, k = self.norms[0](q)[0], self.norms[1](k)[0]
        if angles is not None:
            q, k = self.ops.rotary(q, k, *angles)
        cache = None if batch.kv is None else batch.kv[self.index]
        attended = self.ops.attention(q, k, v, cache, batch, self.scale, self.window, self.softcap)
        return self.out(attended.flatten(1))


class Rotary:
    """Angles of rotary position embeddings, in float32, from the positions of a step.

    They are computed once a step rather than looked up: a table would hold every position the model could ever reach.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.rope = rope
        self.head_dim = head_dim
        frequencies, self.scale = rope_frequencies(rope, head_dim)
        self.frequencies = frequencies.to(device)
        self.exponents = exponents(head_dim).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] int64 → cos, sin [T, D/2] float32."""
        places = positions.float()[:, None]
        angles = places * (self.stretched(places) if self.rope.kind == "dynamic" else self.frequencies)
        if self.scale == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.scale, angles.sin() * self.scale

    def stretched(self, places: Tensor) -> Tensor:
        """Frequencies [T, D/2] of "dynamic": beyond the trained length, the base grows with the position.

        Hugging Face grows it with the sequence, so rotated keys change their meaning while a sequence grows, and a
        prompt's vectors depend on how it was cut. A row's own position instead gives the same up to the trained
        length, the same in token-by-token decoding beyond it, and one answer for chunked and whole prompts.
        """
        numbers = dict(self.rope.parameters)
        factor, trained = numbers["factor"], numbers["original_max_position_embeddings"]
        growth = factor * (places + 1).clamp(min=trained) / trained - (factor - 1)
        base = self.rope.theta * growth ** (self.head_dim / (self.head_dim - 2))
        return base**-self.exponents


def exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def rope_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle a position adds to each pair of dimensions [D/2], and the factor of cos and sin."""
    numbers = dict(rope.parameters)
    frequencies = 1.0 / rope.theta ** exponents(head_dim)
    if rope.kind == "linear":
        return frequencies / numbers["factor"], 1.0
    if rope.kind == "llama3":
        return llama3(frequencies, **numbers), 1.0
    if rope.kind == "yarn":
        return yarn(frequencies, rope.theta, numbers), yarn_scale(numbers)
    return frequencies, 1.0


def llama3(
    frequencies: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones stay, those between blend (Llama 3.1)."""
    turns = original_max_position_embeddings * frequencies / TWO_PI
    stay = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - stay) * frequencies / factor + stay * frequencies


def yarn(frequencies: Tensor, theta: float, numbers: dict[str, float]) -> Tensor:
    """Like llama3, but the blend is linear in the dimension (Peng et al., 2023)."""
    dim = 2 * len(frequencies)
    trained = numbers["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * TWO_PI)) / (2 * math.log(theta))

    low, high = dimension(numbers.get("beta_fast") or 32.0), dimension(numbers.get("beta_slow") or 1.0)
    if numbers.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretch * frequencies / numbers["factor"] + (1 - stretch) * frequencies


def yarn_scale(numbers: dict[str, float]) -> float:
    """The factor of cos and sin that keeps attention as sharp as it was in training."""

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(numbers["factor"]) + 1.0 if numbers["factor"] > 1 else 1.0

    if "attention_factor" in numbers:
        return numbers["attention_factor"]
    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return sharpness(numbers["mscale"]) / sharpness(numbers["mscale_all_dim"])
    return sharpness(1.0)


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
