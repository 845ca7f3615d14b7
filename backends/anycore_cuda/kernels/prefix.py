"""Attention of requests with one row each to the tokens at their start that all of them share, read once for all.

The rows of all requests, times the query heads that share a KV head, are one large matrix: the shared keys pass through
few programs instead of one a request. `decode.py` joins the result with what each request has of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.rounded import RoundedCache
from anycore_cuda.kernels.decode import GRAIN, LOG2E, MAX_SPLITS, Prefix, shared_part, weigh
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.rounded_cache import parts, widened

Shape = tuple[int, int, int, int, int]
"""Rows of a tile (requests times query heads), keys a step, warps, pipeline stages, and programs a processor runs."""


@triton.jit(do_not_specialize=["count", "splits", "group"])
def _prefix(
    q_ptr, cache_ptr, scales_ptr, acc_ptr, stats_ptr, tokens_ptr, table_ptr,
    q_stride, q_head_stride, side_stride, block_stride, head_stride,
    scale, softcap, count, splits, group,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tokens, share = shared_part(tokens_ptr, splits)
    begin = split * share
    end = tl.minimum(begin + share, tokens)
    if begin >= end:
        return

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    known = row < count * group
    request = row // group
    head = kv_head * group + row % group
    inside = known[:, None] & (at < DIM)[None, :]
    q_at = request.to(tl.int64)[:, None] * q_stride + head[:, None] * q_head_stride + at[None, :]
    q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
    unit = LOG2E if CAP else scale * LOG2E
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    k_ptr = cache_ptr + kv_head * head_stride
    token = begin + tl.arange(0, KEYS)
    block = tl.load(table_ptr + token // SIZE)  # looked up a step ahead, as in `decode.py`
    for first in range(begin, end, KEYS):
        token = first + tl.arange(0, KEYS)
        key_at = block.to(tl.int64) * block_stride + (token % SIZE) * DIM
        scale_at = scales_ptr + (kv_head * head_stride + key_at) // DIM
        key_at = key_at[:, None] + at[None, :]
        if DIM == BLOCK_D:
            k = tl.load(k_ptr + key_at)
            v = tl.load(k_ptr + side_stride + key_at)
        else:
            k = tl.load(k_ptr + key_at, mask=(at < DIM)[None, :], other=0.0)
            v = tl.load(k_ptr + side_stride + key_at, mask=(at < DIM)[None, :], other=0.0)
        k_scale = token
        if KIND != "":
            k_scale = tl.load(scale_at)
            v = widened(v, tl.load(scale_at + side_stride // DIM), q.dtype, KIND)
        ahead = token + KEYS
        block = tl.load(table_ptr + ahead // SIZE, mask=ahead < end, other=0)
        p, best, fade = weigh(q, k, k_scale, best, token, scale, softcap, unit, CAP, False, KIND)
        total = total * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")

    part = (split * count + request) * tl.num_programs(1) * group + head
    tl.store(acc_ptr + part[:, None] * BLOCK_D + at[None, :], acc, mask=inside)
    tl.store(stats_ptr + part * 2, best * unit, mask=known)
    tl.store(stats_ptr + part * 2 + 1, total, mask=known)


def shape_of(block_d: int, element_size: int) -> Shape:
    """What suits the processors by their registers and shared memory."""
    if element_size == 4:
        return 32, 32 if block_d <= 128 else 16, 4, 2, 2
    return (64, 64, 4, 3, 2) if block_d <= 128 else (64, 32, 4, 2, 2)


def prefix(
    q: Tensor,
    cache: Tensor | RoundedCache,
    tables: Tensor,
    tokens: Tensor,
    scale: float,
    softcap: float | None,
    processors: int,
    shape: Shape | None = None,
    early: bool = False,
) -> Prefix:
    """Attend from each row of q [n, Hq, D] to the first `tokens` ([1] int32) tokens of its table, equal in all rows.

    cache [2, blocks, Hkv, size, D]; tables [n, P] int32. How many programs are launched does not hang on `tokens`, so
    that they may change in a captured graph; those that find no keys leave at once.
    """
    count, heads, dim = q.shape
    data, scales, kind = parts(cache)
    kv_heads = data.shape[2]
    group = heads // kv_heads
    block_d = triton.next_power_of_2(dim)
    rows, keys, warps, stages, programs = shape or shape_of(block_d, q.element_size())
    assert GRAIN.value % keys == 0
    tiles = triton.cdiv(count * group, rows)
    splits = max(1, min(MAX_SPLITS, programs * processors // (tiles * kv_heads)))
    acc = q.new_empty(splits, count, heads, block_d, dtype=torch.float32)
    stats = q.new_empty(splits, count, heads, 2, dtype=torch.float32)
    side, block, head, _, _ = data.stride()
    launch(
        _prefix, (tiles, kv_heads, splits), q, data, scales, acc, stats, tokens, tables,
        q.stride(0), q.stride(1), side, block, head,
        scale, softcap or 0.0, count, splits, group,
        ROWS=rows, DIM=dim, BLOCK_D=block_d, SIZE=data.shape[3], KEYS=keys, CAP=softcap is not None,
        KIND=kind, EARLY=early, num_warps=warps, num_stages=stages, **launch_options(early),
    )  # fmt: skip
    return Prefix(tokens, splits, acc, stats)
