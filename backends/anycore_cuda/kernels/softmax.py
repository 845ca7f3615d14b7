"""A softmax of base 2 as it goes on over keys, and partial results of it that become one."""

from __future__ import annotations

import triton
import triton.language as tl

from anycore_cuda.kernels.rounded_cache import as_stored

MAX_SPLITS = 16
"""Of the keys of a request, at most: so many partial results are joined."""
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below all scores, and finite: a warp may see no key in a step."""


@triton.jit
def weigh(q, k, k_scale, best, seen, scale, softcap, unit, CAP: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr):
    """Weights of some keys [.., ROWS, KEYS], the highest score so far, and the factor for what was summed before.

    A score times `unit` is an exponent of 2, so that one multiply-add a score is left to do. The numbers of a rounded
    cache are multiplied as they are, and by their scales [.., KEYS] afterwards. q [.., ROWS, D], k [.., D, KEYS].
    """
    LAST: tl.constexpr = len(q.shape) - 1
    if KIND != "":
        k = as_stored(k, q.dtype, KIND)
    scores = tl.dot(q, k, input_precision="tf32x3")
    if KIND != "":
        scores *= tl.expand_dims(k_scale.to(tl.float32), LAST - 1)
    if CAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores / softcap) - 1.0)
    if MASKED:
        scores = tl.where(tl.expand_dims(seen, LAST - 1), scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=LAST))
    return tl.exp2(scores * unit - tl.expand_dims(higher * unit, LAST)), higher, tl.exp2((best - higher) * unit)


@triton.jit
def join(acc, best, total, acc_ptr, stats_ptr, part, stride, count, known, heads, BLOCK_D: tl.constexpr):
    """Take `count` partial results, `stride` apart, into a running softmax, in order: sums are the same every time."""
    at = tl.arange(0, BLOCK_D)
    for _ in tl.range(count, loop_unroll_factor=4):
        theirs = tl.load(stats_ptr + part * 2, mask=known, other=0.0)
        higher = tl.maximum(best, theirs)
        fade = tl.exp2(best - higher)
        weight = tl.exp2(theirs - higher)
        total = total * fade + weight * tl.load(stats_ptr + part * 2 + 1, mask=known, other=1.0)
        found = tl.load(acc_ptr + part[:, None] * BLOCK_D + at[None, :], mask=heads, other=0.0)
        acc = acc * fade[:, None] + weight[:, None] * found
        best = higher
        part += stride
    return acc, best, total


@triton.jit
def meet(acc, best, total):
    """Partial results [N, ..], each of keys of its own, as one."""
    highest = tl.max(best, axis=0)
    weight = tl.exp2(best - highest[None, :])
    return tl.sum(acc * weight[:, :, None], axis=0), highest, tl.sum(total * weight, axis=0)
