"""A KV cache that is rounded when tokens are stored: one byte a number, and a scale for each token and KV head.

A key or value x [D] of one head becomes `scale = bfloat16(max |x| / largest)` and `x / scale`, computed in float32 and
rounded to the nearest number of the format, ties to even; the largest number of int8 is 127, of e4m3 448. It stands for
data * scale. No token's numbers hang on another's, so a prompt is stored the same however it was split over steps.

Scales are bfloat16 for its range, which is float32's: keys may be large and values tiny. That a scale is rounded first
costs nothing, since numbers are divided by what is stored of it. A backend may lay data and scales out as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Of the numbers in each of `formats.KV_CACHES`."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True, eq=False)
class RoundedCache:
    """One layer's keys and values in the contract's own layout; a backend's may be another. Block 0 is scratch."""

    data: Tensor  # [2, blocks, block_size, Hkv, D] int8 or float8_e4m3fn: keys, then values
    scale: Tensor  # [2, blocks, block_size, Hkv] bfloat16

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[.., D] → ([.., D] in `dtype`, [..] bfloat16). A row of zeros has the scale 0; one that holds NaN or infinity has
    NaN, and so has whoever reads it.
    """
    largest = LARGEST[dtype]
    wide = x.float()
    top = wide.abs().amax(-1)
    scale = (top / largest).where(top.isfinite(), torch.nan).to(torch.bfloat16)
    levels = (wide / scale.float()[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    return (levels.round() if dtype == torch.int8 else levels).to(dtype), scale
