"""Weights in oneDNN's own layout, through private torch operations that are tried out before they are trusted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""Rows that oneDNN chooses the layout for: good from 1 row to thousands (measured)."""


def reorder(weight: Tensor) -> Tensor:
    """[O, I] → the same numbers in the layout oneDNN likes; opaque to everything but `linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[.., I] → [.., O]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def usable(dtype: torch.dtype) -> bool:
    """Whether the private operations exist in this torch, take this dtype on this chip, and are right."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 80, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    try:
        packed = reorder(weight)
        for rows in (1, 3, 33):
            x = torch.randn(rows, 80, generator=generator).to(dtype)
            torch.testing.assert_close(linear(x, packed, bias), F.linear(x, weight, bias), rtol=0.02, atol=1e-2)
    except (AttributeError, RuntimeError, AssertionError):
        return False
    return True
