"""Attention of requests with one row each over a paged cache, their keys split across programs.

The query heads that share a KV head are the rows of one matrix product, so each key and value is read once. The
program that finishes last of a request's splits joins their partial results: no second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.launch import launch

MIN_ROWS = 16  # of a matrix product
MAX_SPLITS = 16
MIN_KEYS = 128
"""A split takes at least so many keys: joining results costs as much as reading a few more."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_stride", "window", "splits", "group"])
def _decode(
    q_ptr, cache_ptr, out_ptr, partial_ptr, stats_ptr, done_ptr, tables_ptr, lens_ptr, starts_ptr, requests_ptr,
    q_stride, q_head_stride, table_stride, block_size, side_stride, block_stride, head_stride,
    scale, window, softcap, splits, group,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, MAX_SPLITS: tl.constexpr, CAP: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = place
    q_row = place
    if CHOSEN:
        request = tl.load(requests_ptr + place)
        q_row = tl.load(starts_ptr + request)
    length = tl.load(lens_ptr + request)
    start = tl.maximum(length - window, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(length - start, splits), KEYS), MIN_BLOCKS) * KEYS
    used = tl.cdiv(length - start, share)  # splits that have keys; the others leave at once
    begin = start + split * share
    end = tl.minimum(begin + share, length)
    if split >= used:
        return

    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    heads = (row < group)[:, None] & (at < DIM)[None, :]
    head = kv_head * group + row
    q_at = q_row.to(tl.int64) * q_stride + head[:, None] * q_head_stride + at[None, :]
    q = tl.load(q_ptr + q_at, mask=heads, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    table = tables_ptr + request.to(tl.int64) * table_stride
    for first in range(begin, end, KEYS):
        token = first + tl.arange(0, KEYS)
        known = token < end
        block = tl.load(table + token // block_size, mask=known, other=0).to(tl.int64)
        key_at = block * block_stride + kv_head * head_stride + (token % block_size) * DIM
        inside = known[:, None] & (at < DIM)[None, :]
        k = tl.load(cache_ptr + key_at[:, None] + at[None, :], mask=inside, other=0.0)
        v = tl.load(cache_ptr + side_stride + key_at[:, None] + at[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(known[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        fade = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        best = higher

    out_at = (q_row.to(tl.int64) * tl.num_programs(1) * group + head[:, None]) * DIM + at[None, :]
    alone = not SPLIT
    if SPLIT:
        alone = used == 1
    if alone:
        tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=heads)
    else:
        owner = place * tl.num_programs(1) + kv_head
        part = (owner * splits + split) * ROWS + row
        tl.store(partial_ptr + part[:, None] * BLOCK_D + at[None, :], acc, mask=heads)
        tl.store(stats_ptr + part * 2, best, mask=row < group)
        tl.store(stats_ptr + part * 2 + 1, total, mask=row < group)
        tl.debug_barrier()
        before = tl.atomic_add(done_ptr + owner, 1, sem="acq_rel", scope="gpu")
        if before == used - 1:
            tl.store(done_ptr + owner, 0)  # ready for the next launch
            every = tl.arange(0, MAX_SPLITS)
            all_parts = (owner * splits + every[None, :]) * ROWS + row[:, None]
            bests = tl.load(stats_ptr + all_parts * 2, mask=(every < used)[None, :], other=float("-inf"))
            best = tl.max(tl.where((row < group)[:, None], bests, 0.0), axis=1)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for i in tl.range(used, loop_unroll_factor=4):
                part = (owner * splits + i) * ROWS + row
                weight = tl.exp2(tl.load(stats_ptr + part * 2, mask=row < group, other=0.0) - best)
                total += weight * tl.load(stats_ptr + part * 2 + 1, mask=row < group, other=0.0)
                found = tl.load(partial_ptr + part[:, None] * BLOCK_D + at[None, :], mask=heads, other=0.0)
                acc += weight[:, None] * found
            tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=heads)


def shape_of(block_d: int, element_size: int) -> tuple[int, int, int]:
    """Keys a step, warps and pipeline stages of a program, as measured to be fast."""
    keys = max(16, min(128, 128 * 128 // (block_d * element_size)))
    return keys, 4, 3 if element_size == 2 else 2


def decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    tables: Tensor,
    lens: Tensor,
    counters: Tensor,
    splits: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    requests: Tensor | None = None,
    starts: Tensor | None = None,
    shape: tuple[int, int, int] | None = None,
) -> None:
    """Write the attention of one row a request to `out` [T, Hq, D].

    q [T, Hq, D]; cache [2, blocks, Hkv, size, D]; tables [B, P] int32; lens [B] int32, this row included. Row i is
    request i's, or, with `requests` [n] int32 and `starts` [B + 1] int32, only those requests have rows here.
    `counters` are int32 zeros, one a request and KV head, and zeros again afterwards.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    count = len(q) if requests is None else len(requests)
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    block_d = triton.next_power_of_2(dim)
    assert count * kv_heads <= len(counters)
    partial = stats = counters
    if splits > 1:
        partial = q.new_empty(count * kv_heads * splits * rows * block_d, dtype=torch.float32)
        stats = q.new_empty(count * kv_heads * splits * rows * 2, dtype=torch.float32)
    keys, warps, stages = shape or shape_of(block_d, q.element_size())
    side, block, head, _, _ = cache.stride()
    launch(
        _decode, (count, kv_heads, splits),
        q, cache, out, partial, stats, counters, tables, lens,
        lens if starts is None else starts, lens if requests is None else requests,
        q.stride(0), q.stride(1), tables.stride(0), cache.shape[3], side, block, head,
        scale, 1 << 30 if window is None else window, softcap or 0.0, splits, group,
        SPLIT=splits > 1, ROWS=rows, DIM=dim, BLOCK_D=block_d, KEYS=keys, MIN_BLOCKS=MIN_KEYS // keys,
        MAX_SPLITS=MAX_SPLITS, CAP=softcap is not None, CHOSEN=requests is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
