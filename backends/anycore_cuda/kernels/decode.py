"""Attention of requests with one row each over a paged cache, their keys split across programs.

The query heads that share a KV head are the rows of one matrix product, so each key and value is read once. The
program that finishes last of a request's splits joins their partial results: no second launch. What all requests
share is left out where `prefix.py` has read it once for all of them; its partial results are joined as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.rounded import RoundedCache
from anycore_cuda.kernels.bytes_of_words import COMPILED
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.prefix import Prefix, shared_part
from anycore_cuda.kernels.rotary import prepared
from anycore_cuda.kernels.rounded_cache import as_stored, largest_in, levels_of, parts, scale_of
from anycore_cuda.kernels.softmax import LOG2E, LOWEST, MAX_SPLITS, join, meet, weigh

MIN_ROWS = 16  # of a matrix product
MIN_KEYS = 128
"""A split takes at least so many keys: joining results costs as much as reading a few more."""
PROGRAMS = 6
"""Programs of a launch per processor, which runs several at a time: so many that few are left running at the end."""


@dataclass(frozen=True)
class Raw:
    """What heads lack that are as the projection left them: norms and angles as in `rotary.prepare_heads`, and k's and
    v's way into the cache.
    """

    norms: tuple[Tensor, Tensor, float] | None
    angles: tuple[Tensor, Tensor] | None
    slots: Tensor


@triton.jit
def _ask(ptr, places, COUNT: tl.constexpr):
    # Have the lines of memory that hold so many numbers from each of these places on brought into the L2 cache.
    if COMPILED:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        for line in tl.static_range(0, COUNT, LINE):
            at = (ptr + places + line).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit(do_not_specialize=["table_stride", "window", "group", "shared_splits"])
def _decode(
    q_ptr, cache_ptr, scales_ptr, out_ptr, acc_ptr, stats_ptr, done_ptr, tables_ptr, lens_ptr, starts_ptr, requests_ptr,
    shared_ptr, shared_acc_ptr, shared_stats_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_stride, q_head_stride, table_stride, side_stride, block_stride, head_stride,
    scale, window, softcap, group, shared_splits, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, APART: tl.constexpr, MIN_STEPS: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    LISTED: tl.constexpr, MIXED: tl.constexpr, SHARED: tl.constexpr,
    RAW: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    # KV heads of one block lie side by side, and splits take turns: what is read at about the same time is close.
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    place = tl.program_id(2)
    STEP: tl.constexpr = KEYS * APART if APART else KEYS
    request = tl.load(requests_ptr + place) if LISTED else place
    q_row = tl.load(starts_ptr + request) if MIXED else request
    length = tl.load(lens_ptr + request)
    start = 0
    if WINDOW:
        start = tl.maximum(length - window, 0)
    if SHARED:
        shared, shared_share = shared_part(shared_ptr, shared_splits)
        shared = tl.where(length > shared, shared, 0)  # rows that only fill up a captured batch share nothing
        start = shared
    # Blocks are looked up a step ahead: keys and values are then under way without waiting for their addresses. The
    # first are looked up while the length is. Warps that are apart have each a row of the tokens of a step.
    lanes = tl.arange(0, APART)[:, None] * KEYS + tl.arange(0, KEYS)[None, :] if APART else tl.arange(0, KEYS)
    begin = start + split * STEP
    token = begin + lanes
    table = tables_ptr + request.to(tl.int64) * table_stride
    block = tl.load(table + token // SIZE, mask=token // SIZE < table_stride, other=0)
    steps = tl.cdiv(length - start, STEP)
    used = tl.minimum(tl.cdiv(steps, MIN_STEPS), splits)  # splits that have keys; the others leave at once
    if split >= used:
        return

    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    known = row < group
    heads = known[:, None] & (at < DIM)[None, :]
    head = kv_head * group + row
    row_ptr = q_ptr + q_row.to(tl.int64) * q_stride
    cache_ptr += kv_head * head_stride
    scales_ptr += kv_head * head_stride // DIM
    if RAW:
        # The first keys and values are on their way to the L2 cache while the query is prepared.
        key_at = tl.where(token < length, block.to(tl.int64) * block_stride + token % SIZE * DIM, 0)
        _ask(cache_ptr, key_at, DIM)
        _ask(cache_ptr + side_stride, key_at, DIM)
        cos_ptr += q_row * (DIM // 2)
        sin_ptr += q_row * (DIM // 2)
        q = prepared(
            row_ptr + head * q_head_stride, known, q_weight_ptr, cos_ptr, sin_ptr, eps, DIM, BLOCK_D, NORM, ROTATE
        )
        if (steps - 1) % used == split:  # the newest token is in this split: nobody else needs its key and value
            first_k = kv_heads * group + kv_head + tl.arange(0, 1)
            new_ptr = row_ptr + first_k * q_head_stride
            there = first_k >= 0
            k = prepared(new_ptr, there, k_weight_ptr, cos_ptr, sin_ptr, eps, DIM, BLOCK_D, NORM, ROTATE)
            inside = there[:, None] & (at < DIM)[None, :]
            v_ptr = new_ptr + kv_heads * q_head_stride
            v = tl.load(v_ptr[:, None] + at[None, :], mask=inside, other=0.0)
            slot = tl.load(slots_ptr + q_row)
            to = slot // SIZE * block_stride + slot % SIZE * DIM
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
    # `weights` are summed over the keys at the end: threads, and warps that work together, need not meet in each step.
    if APART:
        q = tl.broadcast_to(q[None, :, :], [APART, ROWS, BLOCK_D])
        best = tl.full([APART, ROWS], LOWEST, tl.float32)
        weights = tl.zeros([APART, ROWS, KEYS], tl.float32)
        acc = tl.zeros([APART, ROWS, BLOCK_D], tl.float32)
    else:
        best = tl.full([ROWS], LOWEST, tl.float32)
        weights = tl.zeros([ROWS, KEYS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    LAST: tl.constexpr = len(q.shape) - 1
    for first in range(begin, length, used * STEP):
        token = first + lanes
        seen = token < length
        key_at = block.to(tl.int64) * block_stride + token % SIZE * DIM
        inside = tl.expand_dims(seen, LAST) & (at < DIM)
        entry = cache_ptr + tl.expand_dims(key_at, LAST) + at
        k = tl.load(entry, mask=inside, other=0.0)
        v = tl.load(entry + side_stride, mask=inside, other=0.0)
        k_scale = seen
        if KIND != "":
            k_scale = tl.load(scales_ptr + key_at // DIM, mask=seen, other=0.0)
            v_scale = tl.load(scales_ptr + (side_stride + key_at) // DIM, mask=seen, other=0.0).to(tl.float32)
            v = (as_stored(v, tl.float32, KIND) * tl.expand_dims(v_scale, LAST)).to(q.dtype)
        ahead = token + used * STEP
        block = tl.load(table + ahead // SIZE, mask=ahead < length, other=0)
        p, best, fade = weigh(q, tl.trans(k), k_scale, best, seen, scale, softcap, unit, CAP, True, KIND)
        fade = tl.expand_dims(fade, LAST)
        weights = weights * fade + p
        acc = acc * fade + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
    best *= unit
    total = tl.sum(weights, axis=LAST)
    if APART:
        acc, best, total = meet(acc, best, total)

    last = used == 1
    if used > 1:
        owner = place * kv_heads + kv_head
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
            acc, best, total = join(acc, best, total, acc_ptr, stats_ptr, part, ROWS, used, known, heads, BLOCK_D)
    if last:
        if SHARED:
            stride = tl.num_programs(2) * kv_heads * group
            part = q_row * kv_heads * group + head
            acc, best, total = join(
                acc, best, total, shared_acc_ptr, shared_stats_ptr, part, stride, tl.cdiv(shared, shared_share),
                known, heads, BLOCK_D,
            )  # fmt: skip
        out_at = (q_row.to(tl.int64) * kv_heads * group + head[:, None]) * DIM + at[None, :]
        tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=heads)


class Shape(NamedTuple):
    """Of a program. Warps that are apart have keys of their own, so many each a step, and meet at the end; others share
    all keys and divide the sums among them.
    """

    keys: int
    warps: int
    stages: int
    apart: bool = False
    registers: int | None = None  # at most, of a thread: so that more programs fit into a processor

    @property
    def step(self) -> int:
        return self.keys * self.warps if self.apart else self.keys


def shape_of(rows: int, block_d: int, element_size: int, kind: str = "") -> Shape:
    """As measured to be fast. Apart, each warp has registers for the sums of all rows, and numbers are multiplied as
    they are kept.
    """
    if element_size == 2 and kind == "" and rows * block_d <= 16 * 128:
        return Shape(32, 4, 3, True) if block_d <= 64 else Shape(16, 4, 3, True, 168)
    return Shape(max(16, min(128, 128 * 128 // (block_d * element_size))), 4, 3 if element_size == 2 else 2)


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
    shape: Shape | None = None,
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
    parts_of = count * kv_heads * splits * rows if splits > 1 else 0  # of one type anyway: it is the same kernel
    acc = q.new_empty(parts_of * block_d, dtype=torch.float32)
    stats = q.new_empty(parts_of * 2, dtype=torch.float32)
    shared = (counters, counters, counters) if prefix is None else (prefix.tokens, prefix.acc, prefix.stats)
    norms = angles = None
    if raw is not None:
        norms, angles = raw.norms, raw.angles
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    shape = shape or shape_of(rows, block_d, q.element_size(), kind)
    options = launch_options(early) | ({"maxnreg": shape.registers} if shape.registers else {})
    side, block, head, _, _ = data.stride()
    launch(
        _decode, (kv_heads, splits, count), q, data, scales, out, acc, stats, counters, tables, lens,
        lens if starts is None else starts, lens if requests is None else requests, *shared,
        q_weight, k_weight, *(angles or (q, q)), lens if raw is None else raw.slots,
        q.stride(0), q.stride(1), tables.stride(0), side, block, head,
        scale, window or 0, softcap or 0.0, group, prefix.splits if prefix else 1, eps,
        ROWS=rows, DIM=dim, BLOCK_D=block_d, SIZE=data.shape[3],
        KEYS=shape.keys, APART=shape.warps if shape.apart else 0, MIN_STEPS=max(1, MIN_KEYS // shape.step),
        CAP=softcap is not None, WINDOW=window is not None,
        LISTED=requests is not None, MIXED=starts is not None, SHARED=prefix is not None,
        RAW=raw is not None, NORM=norms is not None, ROTATE=angles is not None, KIND=kind, EARLY=early,
        num_warps=shape.warps, num_stages=shape.stages, **options,
    )  # fmt: skip
