"""A KV cache that is rounded when tokens are stored (`contract.rounded`): what its kernels have in common.

Numbers lie where those of another cache do, [2, blocks, Hkv, size, D], and a head's scale in [2, blocks, Hkv, size]: an
offset of numbers divided by D. Every way into the cache rounds by the functions here, to the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.rounded import RoundedCache
from anycore_cuda.kernels.bytes_of_words import COMPILED, e4m3_to_float
from anycore_cuda.kernels.quantised_rows import largest_of, rounded

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


def parts(cache: Any) -> tuple[Tensor, Tensor, str]:
    """A cache's numbers, its scales, and what its numbers are: "" if they are kept as they come."""
    if isinstance(cache, RoundedCache):
        return cache.data, cache.scale, KINDS[cache.dtype]
    return cache, cache, ""


@triton.jit
def largest_in(x):
    """Of heads [N, D]: the largest magnitude of each, infinite where one is not finite."""
    return tl.max(largest_of(x.to(tl.float32)), axis=1)


@triton.jit
def scale_of(largest, KIND: tl.constexpr):
    """What is stored as the scale of a head with that largest magnitude; NaN where it is infinite."""
    if KIND == "int8":
        scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    else:
        scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    if not COMPILED:  # the interpreter cuts off what a chip rounds
        bits = scale.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        scale = tl.where(scale == scale, nearest.to(tl.float32, bitcast=True), scale)
    return scale.to(tl.bfloat16)


@triton.jit
def levels_of(x, scale, KIND: tl.constexpr):
    """What is stored of heads [N, D] under these scales [N]."""
    divisor = tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape)
    usable = divisor > 0.0
    level = tl.div_rn(x.to(tl.float32), tl.where(usable, divisor, 1.0))
    return rounded(tl.where(usable, level, 0.0), KIND)


@triton.jit
def as_stored(levels, dtype: tl.constexpr, KIND: tl.constexpr):
    """Numbers of the cache in another type, which has them all."""
    if KIND == "e4m3" and not COMPILED:
        found = e4m3_to_float(levels.to(tl.uint8, bitcast=True)).to(dtype)
    else:
        found = levels.to(dtype)
    return found


@triton.jit
def widened(levels, scale, dtype: tl.constexpr, KIND: tl.constexpr):
    """What heads [N, D] of the cache stand for, given their scales [N]."""
    return (as_stored(levels, tl.float32, KIND) * scale.to(tl.float32)[:, None]).to(dtype)
