"""Numbers on which every right rounding of a KV cache agrees, and what they are after it; for the conformance kit.

Each row's largest is the format's own times a power of two, and none lies near the middle between two that the format
has. Which scale a backend keeps is then its own matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "fp8": 448.0}
EXPONENTS = (-3, 4)
"""Of two: rows of one batch are so different that no two of them can share a scale."""


def settle(x: Tensor, kind: str, generator: torch.Generator) -> None:
    """Change rows [.., D] in place to such numbers, near what they were times a power of two a row."""
    wide = x.double()
    levels = (wide / wide.abs().amax(-1, keepdim=True) * LARGEST[kind] * 0.97).to(x.dtype).double()
    doubtful = nearest(levels + margin(levels, kind), kind) != nearest(levels - margin(levels, kind), kind)
    levels[doubtful] = 0.0
    place = torch.randint(0, x.shape[-1], (*x.shape[:-1], 1), generator=generator)
    levels.scatter_(-1, place, LARGEST[kind] * (1 - 2 * (place % 2)).double())
    x.copy_(levels * 2.0 ** (torch.randint(*EXPONENTS, (*x.shape[:-1], 1), generator=generator) - unit(kind)))


def unit(kind: str) -> int:
    """The exponent of two that brings the largest number of a format near 1."""
    return 7 if kind == "int8" else 9


def stored(x: Tensor, kind: str) -> Tensor:
    """What settled rows are after they were stored, in float64."""
    scale = x.double().abs().amax(-1, keepdim=True) / LARGEST[kind]
    return nearest(x.double() / scale, kind) * scale


def nearest(levels: Tensor, kind: str) -> Tensor:
    """The nearest number of a format, written out: e4m3 has steps of an eighth of the power of two below a number."""
    if kind == "int8":
        return levels.round()
    step = 2.0 ** (levels.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (levels / step).round() * step


def margin(levels: Tensor, kind: str) -> Tensor:
    """What is nearer to the middle between two numbers of the format may be rounded either way."""
    return torch.full_like(levels, 0.1) if kind == "int8" else levels.abs() / 128 + 2.0**-12
