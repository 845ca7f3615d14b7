"""Attention of requests with one row each over a paged cache, their keys dealt out evenly among programs.

Not in use: beside `kernels/decode.py` it took 80 instead of 85 us at 144 rows of qwen2.5-7b, but more at one row, where
splits of fixed number need no schedule (`decoding.py` compares). As many programs are launched as run at a time; all
keys of all requests, laid end to end in turns of some keys, are cut into equal shares, one a program. `schedule` finds
the shares on the device, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.decode import LOG2E, MIN_KEYS, MIN_ROWS, Prefix, Raw, _join, shared_part, weigh
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.rotary import prepared

RUNNING = 3
"""Programs that a processor runs at a time: more find no room in its shared memory."""
MAX_PARTS = 32
"""Programs for each request and KV head, at most: their results are joined one after the other."""
LENGTHS = 256
"""Requests that the schedule looks at in a turn."""
BOUNDS = 32


@dataclass(frozen=True)
class Schedule:
    """Who reads what, the same for every KV head. A turn is `keys` tokens of one request."""

    bounds: Tensor  # [programs + 1, 2] int32: each program's first request and its first turn there; then the end
    parts: Tensor  # [requests, 2] int32: the first and the last program that reads of a request
    keys: int

    @property
    def programs(self) -> int:
        return len(self.bounds) - 1


@triton.jit
def _first(length, window, shared, SHARED: tl.constexpr):
    """The first token to read: without a window, what follows the shared ones, which padding rows do not have."""
    return tl.where(length > shared, shared, 0) if SHARED else tl.maximum(length - window, 0)


@triton.jit
def _turns(
    lens_ptr, requests_ptr, base, count, window, shared,
    KEYS: tl.constexpr, LENGTHS: tl.constexpr, LISTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    # Of some requests, how many turns their keys take.
    place = base + tl.arange(0, LENGTHS)
    request = place
    if LISTED:
        request = tl.load(requests_ptr + place, mask=place < count, other=0)
    length = tl.load(lens_ptr + request, mask=place < count, other=0)
    return tl.cdiv(length - _first(length, window, shared, SHARED), KEYS)


@triton.jit(do_not_specialize=["count", "window", "programs", "shared_splits"])
def _schedule(
    bounds_ptr, parts_ptr, lens_ptr, requests_ptr, shared_ptr, count, window, programs, shared_splits,
    KEYS: tl.constexpr, LEAST: tl.constexpr, LENGTHS: tl.constexpr, BOUNDS: tl.constexpr,
    LISTED: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    shared = 0
    if SHARED:
        shared, _ = shared_part(shared_ptr, shared_splits)
    total = tl.zeros([], tl.int64)
    for base in range(0, count, LENGTHS):
        turns = _turns(lens_ptr, requests_ptr, base, count, window, shared, KEYS, LENGTHS, LISTED, SHARED)
        total += tl.sum(turns.to(tl.int64))
    used = tl.minimum(tl.maximum(total // LEAST, 1), programs)
    bound = tl.program_id(0) * BOUNDS + tl.arange(0, BOUNDS)
    begin = tl.minimum(bound, used) * total // used
    row = tl.zeros([BOUNDS], tl.int32)
    passed = tl.zeros([BOUNDS], tl.int64)
    before = tl.zeros([], tl.int64)
    for base in range(0, count, LENGTHS):
        turns = _turns(lens_ptr, requests_ptr, base, count, window, shared, KEYS, LENGTHS, LISTED, SHARED).to(tl.int64)
        end = before + tl.cumsum(turns)
        over = end[None, :] <= begin[:, None]
        row += tl.sum(over.to(tl.int32), axis=1)
        passed = tl.maximum(passed, tl.max(tl.where(over, end[None, :], 0), axis=1))
        if tl.program_id(0) == 0:
            place = base + tl.arange(0, LENGTHS)
            first = ((end - turns + 1) * used - 1) // total
            last = (end * used - 1) // total
            tl.store(parts_ptr + place * 2, first.to(tl.int32), mask=place < count)
            tl.store(parts_ptr + place * 2 + 1, last.to(tl.int32), mask=place < count)
        before += tl.sum(turns)
    known = bound <= programs
    tl.store(bounds_ptr + bound * 2, tl.minimum(row, count), mask=known)
    tl.store(bounds_ptr + bound * 2 + 1, (begin - passed).to(tl.int32), mask=known)


@triton.jit(do_not_specialize=["table_stride", "window", "group", "shared_splits", "requests"])
def _decode_shares(
    q_ptr, cache_ptr, out_ptr, acc_ptr, stats_ptr, done_ptr, tables_ptr, lens_ptr, bounds_ptr, parts_ptr,
    starts_ptr, requests_ptr, shared_ptr, shared_acc_ptr, shared_stats_ptr,
    q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_stride, q_head_stride, table_stride, side_stride, block_stride, head_stride,
    scale, window, softcap, group, requests, shared_splits, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, LISTED: tl.constexpr, MIXED: tl.constexpr, SHARED: tl.constexpr,
    RAW: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    first_place = tl.load(bounds_ptr + program * 2)
    first_turn = tl.load(bounds_ptr + program * 2 + 1)
    last_place = tl.load(bounds_ptr + program * 2 + 2)
    last_turn = tl.load(bounds_ptr + program * 2 + 3)
    shared = 0
    if SHARED:
        shared, shared_share = shared_part(shared_ptr, shared_splits)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    known = row < group
    heads = known[:, None] & (at < DIM)[None, :]
    head = kv_head * group + row
    unit = LOG2E if CAP else scale * LOG2E
    for place in tl.range(first_place, last_place + tl.where(last_turn > 0, 1, 0)):
        request = place
        if LISTED:
            request = tl.load(requests_ptr + place)
        q_row = request
        if MIXED:
            q_row = tl.load(starts_ptr + request)
        length = tl.load(lens_ptr + request)
        start = _first(length, window, shared, SHARED)
        begin = start + tl.where(place == first_place, first_turn, 0) * KEYS
        end = tl.where(place == last_place, tl.minimum(start + last_turn * KEYS, length), length)
        table = tables_ptr + request.to(tl.int64) * table_stride
        # Blocks are looked up a step ahead: keys and values are then under way without waiting for their addresses.
        token = begin + tl.arange(0, KEYS)
        block = tl.load(table + token // SIZE, mask=token < end, other=0)
        row_ptr = q_ptr + q_row.to(tl.int64) * q_stride
        if RAW:
            row_cos = cos_ptr + q_row * (DIM // 2)
            row_sin = sin_ptr + q_row * (DIM // 2)
            q = prepared(
                row_ptr + head * q_head_stride, known, q_weight_ptr, row_cos, row_sin, eps, DIM, BLOCK_D, NORM, ROTATE
            )
            if end == length:  # the newest token is in this share: nobody else needs its key and value
                first_k = kv_heads * group + kv_head + tl.arange(0, 1)
                new_ptr = row_ptr + first_k * q_head_stride
                there = first_k >= 0
                k = prepared(new_ptr, there, k_weight_ptr, row_cos, row_sin, eps, DIM, BLOCK_D, NORM, ROTATE)
                inside = there[:, None] & (at < DIM)[None, :]
                v_ptr = new_ptr + kv_heads * q_head_stride
                v = tl.load(v_ptr[:, None] + at[None, :], mask=inside, other=0.0)
                slot = tl.load(slots_ptr + q_row)
                to = slot // SIZE * block_stride + kv_head * head_stride + slot % SIZE * DIM
                tl.store(cache_ptr + to + at[None, :], k, mask=inside)
                tl.store(cache_ptr + side_stride + to + at[None, :], v, mask=inside)
                tl.debug_barrier()  # the program's other threads are about to read them
        else:
            q = tl.load(row_ptr + head[:, None] * q_head_stride + at[None, :], mask=heads, other=0.0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        weights = tl.zeros([ROWS, KEYS], tl.float32)  # summed over the keys at the end: warps meet less often
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for first in range(begin, end, KEYS):
            token = first + tl.arange(0, KEYS)
            seen = token < end
            key_at = block.to(tl.int64) * block_stride + kv_head * head_stride + (token % SIZE) * DIM
            inside = seen[:, None] & (at < DIM)[None, :]
            k = tl.load(cache_ptr + key_at[:, None] + at[None, :], mask=inside, other=0.0)
            v = tl.load(cache_ptr + side_stride + key_at[:, None] + at[None, :], mask=inside, other=0.0)
            ahead = token + KEYS
            block = tl.load(table + ahead // SIZE, mask=ahead < end, other=0)
            p, best, fade = weigh(q, k, best, seen, scale, softcap, unit, CAP, True)
            weights = weights * fade[:, None] + p
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        best *= unit
        total = tl.sum(weights, axis=1)

        whole = (begin == start) & (end == length)
        if not whole:
            # A program has two places for parts: what begins its request's keys, and what goes on with another's.
            slot_of = (2 * program + tl.where(begin == start, 1, 0)) * kv_heads + kv_head
            part = slot_of * ROWS + row
            tl.store(acc_ptr + part[:, None] * BLOCK_D + at[None, :], acc, mask=heads)
            tl.store(stats_ptr + part * 2, best, mask=known)
            tl.store(stats_ptr + part * 2 + 1, total, mask=known)
            tl.debug_barrier()
            first_part = tl.load(parts_ptr + place * 2)
            others = tl.load(parts_ptr + place * 2 + 1) - first_part
            owner = place * kv_heads + kv_head
            whole = tl.atomic_add(done_ptr + owner, 1, sem="acq_rel", scope="gpu") == others
            if whole:
                tl.store(done_ptr + owner, 0)  # ready for the next launch
                part = ((2 * first_part + 1) * kv_heads + kv_head) * ROWS + row
                best = tl.load(stats_ptr + part * 2, mask=known, other=0.0)
                total = tl.load(stats_ptr + part * 2 + 1, mask=known, other=1.0)
                acc = tl.load(acc_ptr + part[:, None] * BLOCK_D + at[None, :], mask=heads, other=0.0)
                acc, best, total = _join(
                    acc, best, total, acc_ptr, stats_ptr, part + kv_heads * ROWS, 2 * kv_heads * ROWS, others,
                    known, heads, BLOCK_D,
                )  # fmt: skip
        if whole:
            if SHARED:
                stride = requests * kv_heads * group
                part = q_row * kv_heads * group + head
                acc, best, total = _join(
                    acc, best, total, shared_acc_ptr, shared_stats_ptr, part, stride, tl.cdiv(start, shared_share),
                    known, heads, BLOCK_D,
                )  # fmt: skip
            out_at = (q_row.to(tl.int64) * kv_heads * group + head[:, None]) * DIM + at[None, :]
            tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=heads)


def shape_of(block_d: int, element_size: int) -> tuple[int, int, int]:
    """Keys a turn, warps and pipeline stages of a program."""
    keys = max(16, min(128, 128 * 128 // (block_d * element_size)))
    return keys, 4, 3 if element_size == 2 else 2


def schedule(
    lens: Tensor,
    kv_heads: int,
    keys: int,
    processors: int,
    window: int | None = None,
    requests: Tensor | None = None,
    shared: tuple[Tensor, int] | None = None,
    running: int = RUNNING,
    early: bool = False,
) -> Schedule:
    """Deal out the keys of all requests, or of those listed; `shared` are a prefix's tokens and splits.

    How many programs there are does not hang on lengths, so that they may change in a captured graph.
    """
    count = len(lens) if requests is None else len(requests)
    programs = max(1, min(running * processors // kv_heads, MAX_PARTS * count))
    bounds = lens.new_empty(programs + 1, 2)
    parts = lens.new_empty(count, 2)
    tokens, splits = (lens, 1) if shared is None else shared
    launch(
        _schedule, (triton.cdiv(programs + 1, BOUNDS),), bounds, parts, lens, lens if requests is None else requests,
        tokens, count, 1 << 30 if window is None else window, programs, splits,
        KEYS=keys, LEAST=max(1, MIN_KEYS // keys), LENGTHS=LENGTHS, BOUNDS=BOUNDS,
        LISTED=requests is not None, SHARED=shared is not None, EARLY=early, num_warps=4, **launch_options(early),
    )  # fmt: skip
    return Schedule(bounds, parts, keys)


def decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    tables: Tensor,
    lens: Tensor,
    counters: Tensor,
    shares: Schedule,
    scale: float,
    window: int | None,
    softcap: float | None,
    requests: Tensor | None = None,
    starts: Tensor | None = None,
    prefix: Prefix | None = None,
    raw: Raw | None = None,
    early: bool = False,
    warps: int = 4,
    stages: int | None = None,
    registers: int | None = None,
) -> None:
    """Write the attention of one row a request to `out` [T, Hq, D].

    q [T, Hq, D]; cache [2, blocks, Hkv, size, D]; tables [B, P] int32; lens [B] int32, this row included. Row i is
    request i's, or, with `starts` [B + 1] int32, row starts[i]. `requests` [n] int32 are those to compute. `shares` are
    made from the same lens, window, requests and prefix. `counters` are int32 zeros, one a request and KV head, and
    zeros again afterwards. `prefix` holds the same rows' attention to what they share; there is no window then. With
    `raw`, q is the front of [T, Hq + 2 Hkv, D] as it comes from the projection: heads are prepared, k and v stored
    here; neither `starts` nor `prefix` goes with it.
    """
    heads, dim = q.shape[1:]
    kv_heads = cache.shape[2]
    group = heads // kv_heads
    count = len(shares.parts)
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    block_d = triton.next_power_of_2(dim)
    assert count * kv_heads <= len(counters)
    assert scale > 0
    assert prefix is None or window is None
    assert prefix is None or starts is None
    assert raw is None or (prefix is None and starts is None)
    places = 2 * shares.programs * kv_heads * rows
    acc = q.new_empty(places * block_d, dtype=torch.float32)
    stats = q.new_empty(places * 2, dtype=torch.float32)
    shared = (counters, counters, counters) if prefix is None else (prefix.tokens, prefix.acc, prefix.stats)
    norms = angles = None
    if raw is not None:
        norms, angles = raw.norms, raw.angles
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    side, block, head, _, _ = cache.stride()
    launch(
        _decode_shares, (shares.programs, kv_heads), q, cache, out, acc, stats, counters, tables, lens,
        shares.bounds, shares.parts,
        lens if starts is None else starts, lens if requests is None else requests, *shared,
        q_weight, k_weight, *(angles or (q, q)), lens if raw is None else raw.slots,
        q.stride(0), q.stride(1), tables.stride(0), side, block, head,
        scale, 1 << 30 if window is None else window, softcap or 0.0, group, count, prefix.splits if prefix else 1,
        eps,
        ROWS=rows, DIM=dim, BLOCK_D=block_d, SIZE=cache.shape[3], KEYS=shares.keys,
        CAP=softcap is not None, LISTED=requests is not None, MIXED=starts is not None, SHARED=prefix is not None,
        RAW=raw is not None, NORM=norms is not None, ROTATE=angles is not None, EARLY=early,
        num_warps=warps, num_stages=stages or shape_of(block_d, q.element_size())[2], **launch_options(early),
        **({"maxnreg": registers} if registers else {}),
    )  # fmt: skip
