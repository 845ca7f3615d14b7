"""Between the projection and attention, in one pass: norms of q and k heads, rotation, storing k and v in the cache.

Steps that only decode need no pass for it: `decode.py` does it on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.rounded import RoundedCache
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.rounded_cache import largest_in, levels_of, parts, scale_of

TOKENS = 16
FEW = 64
"""Up to so many rows each has programs of its own: nothing is short but time."""


@triton.jit
def prepared(
    head_ptr, known, weight_ptr, cos_ptr, sin_ptr, eps,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """What `_prepare` makes of some heads [N, BLOCK_D] of one row, given where each begins and the row's angles."""
    at = tl.arange(0, BLOCK_D)
    other = (at + DIM // 2) % DIM  # what each number is turned with
    inside = known[:, None] & (at < DIM)[None, :]
    x = tl.load(head_ptr[:, None] + at[None, :], mask=inside, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = tl.load(head_ptr[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x = (x * scale * tl.load(weight_ptr + at, mask=at < DIM, other=0.0)[None, :]).to(dtype).to(tl.float32)
        y = (y * scale * tl.load(weight_ptr + other, mask=at < DIM, other=0.0)[None, :]).to(dtype).to(tl.float32)
    if ROTATE:
        cos = tl.load(cos_ptr + at % (DIM // 2), mask=at < DIM, other=0.0)
        sin = tl.load(sin_ptr + at % (DIM // 2), mask=at < DIM, other=0.0)
        x = x * cos[None, :] + y * tl.where(at < DIM // 2, -sin, sin)[None, :]
    return x.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _prepare(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, slots_ptr, cache_ptr, scales_ptr,
    rows, stride, block_size, side_stride, block_stride, head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, STORE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    # One program: TOKENS rows of one head, as its two halves.
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (pair < HALF)[None, :]
    at = row.to(tl.int64)[:, None] * stride + head * 2 * HALF + pair[None, :]
    raw = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    dtype = raw.dtype
    first = raw.to(tl.float32)
    second = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            if head < HEADS:
                low = tl.load(q_weight_ptr + pair, mask=pair < HALF, other=0.0)
                high = tl.load(q_weight_ptr + HALF + pair, mask=pair < HALF, other=0.0)
            else:
                low = tl.load(k_weight_ptr + pair, mask=pair < HALF, other=0.0)
                high = tl.load(k_weight_ptr + HALF + pair, mask=pair < HALF, other=0.0)
            mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
            scale = tl.rsqrt(mean + eps)[:, None]
            first = (first * scale * low[None, :]).to(dtype).to(tl.float32)
            second = (second * scale * high[None, :]).to(dtype).to(tl.float32)
        if ROTATE:
            angle = row[:, None] * HALF + pair[None, :]
            cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
            sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        tl.store(qkv_ptr + at, first.to(dtype), mask=inside)
        tl.store(qkv_ptr + at + HALF, second.to(dtype), mask=inside)
    if STORE:  # noqa: SIM102 (a constant: without it nothing below is compiled)
        if head >= HEADS:
            slot = tl.load(slots_ptr + row, mask=row < rows, other=0)
            kv_head = (head - HEADS) % KV_HEADS
            place = (slot // block_size) * block_stride + kv_head * head_stride + (slot % block_size) * 2 * HALF
            if head >= HEADS + KV_HEADS:
                place += side_stride
            cache_at = cache_ptr + place[:, None] + pair[None, :]
            if KIND == "":
                tl.store(cache_at, first.to(dtype), mask=inside)
                tl.store(cache_at + HALF, second.to(dtype), mask=inside)
            else:
                one, other = first.to(dtype), second.to(dtype)
                stored = scale_of(tl.maximum(largest_in(one), largest_in(other)), KIND)
                tl.store(cache_at, levels_of(one, stored, KIND), mask=inside)
                tl.store(cache_at + HALF, levels_of(other, stored, KIND), mask=inside)
                tl.store(scales_ptr + place // (2 * HALF), stored, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _store(
    k_ptr, v_ptr, slots_ptr, cache_ptr, scales_ptr, rows, k_stride, k_head_stride, v_stride, v_head_stride,
    block_size, side_stride, block_stride, head_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (at < DIM)[None, :]
    slot = tl.load(slots_ptr + row, mask=row < rows, other=0)
    place = (slot // block_size) * block_stride + head * head_stride + (slot % block_size) * DIM
    to = cache_ptr + place[:, None] + at[None, :]
    wide = row.to(tl.int64)[:, None]
    k = tl.load(k_ptr + wide * k_stride + head * k_head_stride + at[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + wide * v_stride + head * v_head_stride + at[None, :], mask=inside, other=0.0)
    if KIND == "":
        tl.store(to, k, mask=inside)
        tl.store(to + side_stride, v, mask=inside)
    else:
        k_scale = scale_of(largest_in(k), KIND)
        v_scale = scale_of(largest_in(v), KIND)
        tl.store(to, levels_of(k, k_scale, KIND), mask=inside)
        tl.store(to + side_stride, levels_of(v, v_scale, KIND), mask=inside)
        tl.store(scales_ptr + place // DIM, k_scale, mask=row < rows)
        tl.store(scales_ptr + (side_stride + place) // DIM, v_scale, mask=row < rows)


def prepare_heads(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    angles: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float] | None,
    cache: Tensor | RoundedCache | None,
    slots: Tensor | None,
    early: bool = False,
) -> None:
    """Change q and k of qkv [T, Hq + 2 Hkv, D] in place, and store k and v in a cache [2, blocks, Hkv, size, D].

    `norms` are the weights [D] of q's and k's norm and their epsilon.
    """
    rows, count, dim = qkv.shape
    if rows == 0 or (cache is None and angles is None and norms is None):
        return
    tokens = 1 if rows <= FEW else TOKENS
    cos, sin = angles if angles is not None else (qkv, qkv)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    data, scales, kind = parts(qkv if cache is None else cache)
    side, block, head = (0, 0, 0) if cache is None else data.stride()[:3]
    launch(
        _prepare, (triton.cdiv(rows, tokens), count if cache is not None else heads + kv_heads),
        qkv, cos, sin, q_weight, k_weight, qkv if slots is None else slots, data, scales,
        rows, qkv.stride(0), 1 if cache is None else data.shape[3], side, block, head, eps,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), TOKENS=tokens,
        NORM=norms is not None, ROTATE=angles is not None, STORE=cache is not None, KIND=kind, EARLY=early,
        num_warps=1 if tokens == 1 else 2, **launch_options(early),
    )  # fmt: skip


def store(k: Tensor, v: Tensor, cache: Tensor | RoundedCache, slots: Tensor) -> None:
    """Write rows k, v [T, Hkv, D] at `slots` of a cache [2, blocks, Hkv, size, D]."""
    rows, heads, dim = k.shape
    if rows == 0:
        return
    data, scales, kind = parts(cache)
    side, block, head, _, _ = data.stride()
    launch(
        _store, (triton.cdiv(rows, TOKENS), heads),
        k, v, slots, data, scales, rows, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        data.shape[3], side, block, head,
        DIM=dim, BLOCK=triton.next_power_of_2(dim), TOKENS=TOKENS, KIND=kind, num_warps=2,
    )  # fmt: skip
