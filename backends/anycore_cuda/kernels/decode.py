"""Attention of requests with one row each over a paged cache, their keys split across programs.

The query heads that share a KV head are the rows of one matrix product, so each key and value is read once. The
program that finishes last of a request's splits joins their partial results: no second launch. What all requests
share is left out where `prefix.py` has read it once for all of them; its partial results are joined as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.rounded import RoundedCache
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.rotary import prepared
from anycore_cuda.kernels.rounded_cache import as_stored, largest_in, levels_of, parts, scale_of, widened

MIN_ROWS = 16  # of a matrix product
MAX_SPLITS = 16
MIN_KEYS = 128
"""A split takes at least so many keys: joining results costs as much as reading a few more."""
GRAIN = tl.constexpr(64)
"""Shared tokens are counted in these; what is left over is read with each request's own."""
LOG2E = tl.constexpr(1.4426950408889634)
PROGRAMS = 3
"""Programs of a launch per processor, which runs several at a time: so many that few are left running at the end."""


@dataclass(frozen=True)
class Prefix:
    """Partial results of n rows over the first tokens of all: as many parts as there are, [splits, n, Hq] of each."""

    tokens: Tensor  # [1] int32: how many tokens all have in common
    splits: int
    acc: Tensor  # float32 [splits, n, Hq, D up to a power of two]
    stats: Tensor  # float32 [splits, n, Hq, 2]: the highest score (of base 2), and the sum of weights


@dataclass(frozen=True)
class Raw:
    """What heads lack that are as the projection left them: norms and angles as in `rotary.prepare_heads`, and k's and
    v's way into the cache.
    """

    norms: tuple[Tensor, Tensor, float] | None
    angles: tuple[Tensor, Tensor] | None
    slots: Tensor


@triton.jit
def weigh(q, k, k_scale, best, seen, scale, softcap, unit, CAP: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr):
    """Weights of some keys [ROWS, KEYS], the highest score so far, and the factor for what was summed before.

    A score times `unit` is an exponent of 2, so that one multiply-add a score is left to do. The numbers of a rounded
    cache are multiplied as they are, and by their scales afterwards.
    """
    if KIND != "":
        k = as_stored(k, q.dtype, KIND)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if KIND != "":
        scores *= k_scale.to(tl.float32)[None, :]
    if CAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores / softcap) - 1.0)
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    return tl.exp2(scores * unit - (higher * unit)[:, None]), higher, tl.exp2((best - higher) * unit)


@triton.jit
def shared_part(tokens_ptr, splits):
    """How many tokens are read once for all requests, and how many of them each of the splits reads."""
    tokens = tl.load(tokens_ptr) // GRAIN * GRAIN
    return tokens, tl.cdiv(tl.maximum(tokens // GRAIN, 1), splits) * GRAIN


@triton.jit
def _join(acc, best, total, acc_ptr, stats_ptr, part, stride, count, known, heads, BLOCK_D: tl.constexpr):
    # Take `count` partial results, `stride` apart, into a running softmax, in order: sums are the same every time.
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


@triton.jit(do_not_specialize=["table_stride", "window", "splits", "group", "shared_splits"])
def _decode(
    q_ptr, cache_ptr, scales_ptr, out_ptr, acc_ptr, stats_ptr, done_ptr, tables_ptr, lens_ptr, starts_ptr, requests_ptr,
    shared_ptr, shared_acc_ptr, shared_stats_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_stride, q_head_stride, table_stride, side_stride, block_stride, head_stride,
    scale, window, softcap, splits, group, shared_splits, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, CAP: tl.constexpr,
    LISTED: tl.constexpr, MIXED: tl.constexpr, SHARED: tl.constexpr,
    RAW: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    place = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request = place
    if LISTED:
        request = tl.load(requests_ptr + place)
    q_row = request
    if MIXED:
        q_row = tl.load(starts_ptr + request)
    length = tl.load(lens_ptr + request)
    start = tl.maximum(length - window, 0)
    if SHARED:
        shared, shared_share = shared_part(shared_ptr, shared_splits)
        shared = tl.where(length > shared, shared, 0)  # rows that only fill up a captured batch share nothing
        start = shared
    share = tl.maximum(tl.cdiv(tl.cdiv(length - start, splits), KEYS), MIN_BLOCKS) * KEYS
    used = tl.cdiv(length - start, share)  # splits that have keys; the others leave at once
    begin = start + split * share
    end = tl.minimum(begin + share, length)
    if split >= used:
        return

    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    known = row < group
    heads = known[:, None] & (at < DIM)[None, :]
    head = kv_head * group + row
    table = tables_ptr + request.to(tl.int64) * table_stride
    # Blocks are looked up a step ahead: keys and values are then under way without waiting for their addresses.
    token = begin + tl.arange(0, KEYS)
    block = tl.load(table + token // SIZE, mask=token < end, other=0)
    row_ptr = q_ptr + q_row.to(tl.int64) * q_stride
    if RAW:
        cos_ptr += q_row * (DIM // 2)
        sin_ptr += q_row * (DIM // 2)
        q = prepared(
            row_ptr + head * q_head_stride, known, q_weight_ptr, cos_ptr, sin_ptr, eps, DIM, BLOCK_D, NORM, ROTATE
        )
        if end == length:  # the newest token is in this split: nobody else needs its key and value
            first_k = tl.num_programs(1) * group + kv_head + tl.arange(0, 1)
            new_ptr = row_ptr + first_k * q_head_stride
            there = first_k >= 0
            k = prepared(new_ptr, there, k_weight_ptr, cos_ptr, sin_ptr, eps, DIM, BLOCK_D, NORM, ROTATE)
            inside = there[:, None] & (at < DIM)[None, :]
            v_ptr = new_ptr + tl.num_programs(1) * q_head_stride
            v = tl.load(v_ptr[:, None] + at[None, :], mask=inside, other=0.0)
            slot = tl.load(slots_ptr + q_row)
            to = slot // SIZE * block_stride + kv_head * head_stride + slot % SIZE * DIM
            if KIND != "":
                k_scale = scale_of(largest_in(k), KIND)
                v_scale = scale_of(largest_in(v), KIND)
                tl.store(scales_ptr + to // DIM + tl.arange(0, 1), k_scale)
                tl.store(scales_ptr + (side_stride + to) // DIM + tl.arange(0, 1), v_scale)
                k = levels_of(k, k_scale, KIND)
                v = levels_of(v, v_scale, KIND)
            tl.store(cache_ptr + to + at[None, :], k, mask=inside)
            tl.store(cache_ptr + side_stride + to + at[None, :], v, mask=inside)
            tl.debug_barrier()  # the program's other threads are about to read them
    else:
        q = tl.load(row_ptr + head[:, None] * q_head_stride + at[None, :], mask=heads, other=0.0)
    unit = LOG2E if CAP else scale * LOG2E
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS, KEYS], tl.float32)  # summed over the keys at the end: warps need not meet in each step
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in range(begin, end, KEYS):
        token = first + tl.arange(0, KEYS)
        seen = token < end
        key_at = block.to(tl.int64) * block_stride + kv_head * head_stride + (token % SIZE) * DIM
        inside = seen[:, None] & (at < DIM)[None, :]
        k = tl.load(cache_ptr + key_at[:, None] + at[None, :], mask=inside, other=0.0)
        v = tl.load(cache_ptr + side_stride + key_at[:, None] + at[None, :], mask=inside, other=0.0)
        k_scale = seen
        if KIND != "":
            k_scale = tl.load(scales_ptr + key_at // DIM, mask=seen, other=0.0)
            v = widened(v, tl.load(scales_ptr + (side_stride + key_at) // DIM, mask=seen, other=0.0), q.dtype, KIND)
        ahead = token + KEYS
        block = tl.load(table + ahead // SIZE, mask=ahead < end, other=0)
        p, best, fade = weigh(q, k, k_scale, best, seen, scale, softcap, unit, CAP, True, KIND)
        weights = weights * fade[:, None] + p
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
    best *= unit
    total = tl.sum(weights, axis=1)

    last = used == 1
    if used > 1:
        owner = place * tl.num_programs(1) + kv_head
        part = (owner * splits + split) * ROWS + row
        tl.store(acc_ptr + part[:, None] * BLOCK_D + at[None, :], acc, mask=heads)
        tl.store(stats_ptr + part * 2, best, mask=known)
        tl.store(stats_ptr + part * 2 + 1, total, mask=known)
        tl.debug_barrier()
        last = tl.atomic_add(done_ptr + owner, 1, sem="acq_rel", scope="gpu") == used - 1
        if last:
            tl.store(done_ptr + owner, 0)  # ready for the next launch
            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            part = owner * splits * ROWS + row
            acc, best, total = _join(acc, best, total, acc_ptr, stats_ptr, part, ROWS, used, known, heads, BLOCK_D)
    if last:
        if SHARED:
            stride = tl.num_programs(0) * tl.num_programs(1) * group
            part = q_row * tl.num_programs(1) * group + head
            acc, best, total = _join(
                acc, best, total, shared_acc_ptr, shared_stats_ptr, part, stride, tl.cdiv(shared, shared_share),
                known, heads, BLOCK_D,
            )  # fmt: skip
        out_at = (q_row.to(tl.int64) * tl.num_programs(1) * group + head[:, None]) * DIM + at[None, :]
        tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=heads)


def shape_of(block_d: int, element_size: int) -> tuple[int, int, int]:
    """Keys a step, warps and pipeline stages of a program, as measured to be fast."""
    keys = max(16, min(128, 128 * 128 // (block_d * element_size)))
    return keys, 4, 3 if element_size == 2 else 2


def splits_of(requests: int, kv_heads: int, processors: int) -> int:
    """Programs per request and KV head: a power of two, so many that long requests do not end much later."""
    splits = 1
    while splits < MAX_SPLITS and requests * kv_heads * splits < PROGRAMS * processors:
        splits *= 2
    return splits


def decode(
    q: Tensor,
    cache: Tensor | RoundedCache,
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
    prefix: Prefix | None = None,
    shape: tuple[int, int, int] | None = None,
    raw: Raw | None = None,
    early: bool = False,
) -> None:
    """Write the attention of one row a request to `out` [T, Hq, D].

    q [T, Hq, D]; cache [2, blocks, Hkv, size, D]; tables [B, P] int32; lens [B] int32, this row included. Row i is
    request i's, or, with `starts` [B + 1] int32, row starts[i]. `requests` [n] int32 are those to compute, in the order
    in which their programs start: the longest first leaves no late stragglers.
    `counters` are int32 zeros, one a request and KV head, and zeros again afterwards. `prefix` holds the same rows'
    attention to what they share; there is no window then. With `raw`, q is the front of [T, Hq + 2 Hkv, D] as it comes
    from the projection: heads are prepared, k and v stored here; neither `starts` nor `prefix` goes with it.
    """
    heads, dim = q.shape[1:]
    data, scales, kind = parts(cache)
    kv_heads = data.shape[2]
    group = heads // kv_heads
    count = len(q) if requests is None else len(requests)
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    block_d = triton.next_power_of_2(dim)
    assert count * kv_heads <= len(counters)
    assert scale > 0
    assert prefix is None or window is None
    assert prefix is None or starts is None
    assert raw is None or (prefix is None and starts is None)
    acc = stats = counters
    if splits > 1:
        acc = q.new_empty(count * kv_heads * splits * rows * block_d, dtype=torch.float32)
        stats = q.new_empty(count * kv_heads * splits * rows * 2, dtype=torch.float32)
    shared = (counters, counters, counters) if prefix is None else (prefix.tokens, prefix.acc, prefix.stats)
    norms = angles = None
    if raw is not None:
        norms, angles = raw.norms, raw.angles
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    keys, warps, stages = shape or shape_of(block_d, q.element_size())
    side, block, head, _, _ = data.stride()
    launch(
        _decode, (count, kv_heads, splits), q, data, scales, out, acc, stats, counters, tables, lens,
        lens if starts is None else starts, lens if requests is None else requests, *shared,
        q_weight, k_weight, *(angles or (q, q)), lens if raw is None else raw.slots,
        q.stride(0), q.stride(1), tables.stride(0), side, block, head,
        scale, 1 << 30 if window is None else window, softcap or 0.0, splits, group, prefix.splits if prefix else 1,
        eps,
        ROWS=rows, DIM=dim, BLOCK_D=block_d, SIZE=data.shape[3], KEYS=keys, MIN_BLOCKS=max(1, MIN_KEYS // keys),
        CAP=softcap is not None, LISTED=requests is not None, MIXED=starts is not None, SHARED=prefix is not None,
        RAW=raw is not None, NORM=norms is not None, ROTATE=angles is not None, KIND=kind, EARLY=early,
        num_warps=warps, num_stages=stages, **launch_options(early),
    )  # fmt: skip
