"""Angles of rotary embeddings (Su et al., 2021) in every variant of `rope.KINDS`, as Hugging Face computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anycore.contract.ops import Ops
from anycore.models.spec import RopeSpec

TWO_PI = 2 * math.pi


class Rotary:
    """Angles of rotary position embeddings, in float32, from the positions of a step.

    They are computed once a step rather than looked up: a table would hold every position the model could ever reach.
    """

    def __init__(self, ops: Ops, rope: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.ops = ops
        self.rope = rope
        self.head_dim = head_dim
        frequencies, self.scale = rope_frequencies(rope, head_dim)
        self.frequencies = frequencies.to(device)
        self.exponents = exponents(head_dim).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] int64 → cos, sin [T, D/2] float32."""
        if self.rope.kind != "dynamic":
            return self.ops.angles(positions, self.frequencies, self.scale)
        places = positions[:, None]
        angles = places * self.stretched(places.float())
        return angles.cos(), angles.sin()

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
