"""Attention of requests with several rows: whole prompts, chunks over a paged cache, and packed encoders.

One program computes a tile of rows of one KV head: `tokens` rows of a request times the query heads that share the
head. Tiles are listed on the host (`plan.py`), so no program starts for padding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.rounded_cache import as_stored, widened

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _span(
    acc, best, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, position, seq_len, lo, hi,
    kv_stride, block_stride, scale, window, softcap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PAGED: tl.constexpr, KIND: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    # Take the keys lo … hi - 1 into the running softmax, in powers of 2; without MASKED every row sees all of them.
    key = tl.arange(0, KEYS)
    at = tl.arange(0, BLOCK_D)
    packed_at = key[:, None] * kv_stride + at[None, :]
    if not PAGED:
        k_ptr += lo.to(tl.int64) * kv_stride
        v_ptr += lo.to(tl.int64) * kv_stride
    for first in range(lo, hi, KEYS):
        token = first + key
        known = token < seq_len
        if PAGED:
            if MASKED:
                block = tl.load(table + token // SIZE, mask=known, other=0).to(tl.int64)
            else:
                block = tl.load(table + token // SIZE).to(tl.int64)
            place = block * block_stride + (token % SIZE) * DIM
            paged_at = place[:, None] + at[None, :]
            k_at, v_at = k_ptr + paged_at, v_ptr + paged_at
        else:
            k_at, v_at = k_ptr + packed_at, v_ptr + packed_at
            k_ptr += KEYS * kv_stride
            v_ptr += KEYS * kv_stride
        if MASKED or DIM != BLOCK_D:
            inside = known[:, None] & (at < DIM)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        if KIND != "":
            k = as_stored(k, q.dtype, KIND)
            v = widened(v, tl.load(v_scales_ptr + place // DIM, mask=known, other=0.0), q.dtype, KIND)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if KIND != "":
            scores *= tl.load(k_scales_ptr + place // DIM, mask=known, other=0.0).to(tl.float32)[None, :]
        if CAP:
            scores = softcap * LOG2E * (2.0 * tl.sigmoid(2.0 * scale * scores / softcap) - 1.0)
            factor = 1.0
        else:
            factor = scale * LOG2E  # positive, so that the largest score is known before it is scaled
        if MASKED:
            distance = position[:, None] - token[None, :]
            # A causal row that is stored knows all keys up to its own.
            seen = distance >= 0 if CAUSAL else known[None, :]
            if WINDOW:
                seen = seen & (distance < window) & (distance > -window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1) * factor)
        pivot = higher
        if MASKED:
            # A row that has seen nothing yet stays at -inf; 0 keeps its exponents free of NaN.
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(best - pivot)
        p = tl.exp2(scores * factor - pivot[:, None])
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        best = higher
    return acc, best, total


@triton.jit(do_not_specialize=["table_stride", "window", "group", "tokens"])
def _attend(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, tiles_ptr, starts_ptr, lens_ptr, tables_ptr,
    q_stride, q_head_stride, kv_stride, kv_head_stride, table_stride, block_stride,
    scale, window, softcap, group, tokens,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, SIZE: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PAGED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    request = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    q_start = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - q_start
    seq_len = tl.load(lens_ptr + request)
    context = seq_len - q_len

    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    token = first + row // group
    head = kv_head * group + row % group
    inside = ((token < q_len) & (row < tokens * group))[:, None] & (at < DIM)[None, :]
    q_row = (q_start + token).to(tl.int64)[:, None]
    q = tl.load(q_ptr + q_row * q_stride + head[:, None] * q_head_stride + at[None, :], mask=inside, other=0.0)
    position = context + token
    low = context + first
    high = context + tl.minimum(first + tokens, q_len) - 1  # first and last position of the tile
    begin = tl.maximum(low - window + 1, 0) // KEYS * KEYS
    if CAUSAL:
        end = high + 1
        clear = (low + 1) // KEYS * KEYS  # keys before it are seen by every row
    else:
        end = tl.minimum(seq_len, high + window)
        clear = seq_len // KEYS * KEYS
    if WINDOW:
        clear = tl.where(window < seq_len, begin, clear)

    k_ptr += kv_head * kv_head_stride
    v_ptr += kv_head * kv_head_stride
    if KIND != "":
        k_scales_ptr += kv_head * kv_head_stride // DIM
        v_scales_ptr += kv_head * kv_head_stride // DIM
    if not PAGED:
        k_ptr += q_start.to(tl.int64) * kv_stride
        v_ptr += q_start.to(tl.int64) * kv_stride
    table = tables_ptr + request.to(tl.int64) * table_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    acc, best, total = _span(
        acc, best, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, position, seq_len, begin, clear,
        kv_stride, block_stride, scale, window, softcap,
        DIM, BLOCK_D, KEYS, SIZE, CAP, WINDOW, CAUSAL, PAGED, KIND, False,
    )  # fmt: skip
    acc, best, total = _span(
        acc, best, total, q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, position, seq_len, clear, end,
        kv_stride, block_stride, scale, window, softcap,
        DIM, BLOCK_D, KEYS, SIZE, CAP, WINDOW, CAUSAL, PAGED, KIND, True,
    )  # fmt: skip
    out_at = (q_row * tl.num_programs(1) * group + head[:, None]) * DIM + at[None, :]
    tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def tile_rows(group: int, dim: int, element_size: int, paged: bool) -> int:
    """Rows of a tile (tokens times query heads), as measured to be fast: finding blocks pays off over more rows."""
    rows = 32 if element_size == 4 else 128 if paged and dim <= 128 else 64
    return max(rows, int(triton.next_power_of_2(group)))


def shape_of(rows: int, block_d: int, element_size: int) -> tuple[int, int, int]:
    """Keys a step, warps and pipeline stages of a program, as measured to be fast."""
    if element_size == 2:
        return (64, 4 if rows <= 128 else 8, 3) if block_d <= 128 else (32, 4, 2)
    return (32, 4, 2) if block_d <= 128 else (16, 4, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    tiles: Tensor,
    rows: int,
    starts: Tensor,
    lens: Tensor,
    tables: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    shape: tuple[int, int, int] | None = None,
    scales: Tensor | None = None,
    kind: str = "",
) -> None:
    """Write the attention of the rows in `tiles` to `out` [T, Hq, D].

    `tiles` [n, 2] int32 are (request, first row within it), each of `rows // group` tokens. With `tables` [B, P] int32,
    k and v are the sides [blocks, Hkv, size, D] of a cache, else the batch's own rows [T, Hkv, D]. A rounded cache has
    `scales` [2, blocks, Hkv, size], and a `kind` of numbers.
    """
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    block_d = triton.next_power_of_2(dim)
    keys, warps, stages = shape or shape_of(rows, block_d, q.element_size())
    paged = tables is not None
    launch(
        _attend, (len(tiles), kv_heads),
        q, k, v, k if scales is None else scales[0], v if scales is None else scales[1],
        out, tiles, starts, lens, tables if tables is not None else lens,
        q.stride(0), q.stride(1), 0 if paged else k.stride(0), k.stride(1),
        tables.stride(0) if tables is not None else 0, k.stride(0) if paged else 0,
        scale, 1 << 29 if window is None else window, softcap or 0.0, group, rows // group,
        ROWS=rows, DIM=dim, BLOCK_D=block_d, KEYS=keys, SIZE=k.shape[2] if paged else 1,
        CAP=softcap is not None, WINDOW=window is not None, CAUSAL=causal, PAGED=paged, KIND=kind,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
