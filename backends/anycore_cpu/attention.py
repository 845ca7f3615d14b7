"""Attention on a CPU: few large calls of torch's flash kernel instead of one small call a request.

`prepare` looks at a batch once a step and cuts it into parts, `Parts.attend` runs them in every layer. The cache
keeps the contract's default layout [2, blocks, block_size, Hkv, D]: a block is one run of memory, so gathering a
request's blocks is one copy, and torch's kernel takes the heads as a stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.reference import visible

CALL_COST = 512
"""Padded key places that cost as much as one more call, measured: more padding than this splits a group."""


@dataclass(slots=True)
class Singles:
    """Requests with one row each (decoding), padded to the longest: the heads of a group become the rows."""

    rows: slice | Tensor  # [n] rows of the batch
    count: int
    blocks: slice | Tensor  # [n * P] blocks to gather; a slice when one request's blocks lie side by side
    start: int  # keys to skip at the front; only when n is 1
    length: int  # keys to look at, of each request
    bias: Tensor | None  # [n, 1, 1, length] float32: 0 or -inf

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """q [n, Hq, D], gathered keys and values [n, L, Hkv, D] → [n, Hq, D]."""
        heads, dim = q.shape[1:]
        grouped = q.view(self.count, keys.shape[2], -1, dim)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self.bias, scale=scale
        )
        return out.reshape(self.count, heads, dim)


@dataclass(slots=True)
class Stack:
    """Consecutive requests with equally many rows and keys; one request alone if it has a history."""

    rows: slice
    count: int
    blocks: slice | Tensor | None  # None: there is no history, keys and values are the batch's own rows
    start: int
    length: int
    bias: Tensor | None  # [rows of a request, length] float32
    causal: bool  # the kernel's own causal mask will do

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """q [n * Q, Hq, D], keys and values [n, L, Hkv, D] → [n * Q, Hq, D]."""
        heads, dim = q.shape[1:]
        out = F.scaled_dot_product_attention(
            q.view(self.count, -1, heads, dim).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self.bias,
            is_causal=self.causal,
            scale=scale,
            enable_gqa=heads != keys.shape[2],
        )
        return out.transpose(1, 2).reshape(-1, heads, dim)


class Plan:
    """What one step needs in every layer. Parts are made when a window is first seen: most models have one or two."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.fresh = fresh_blocks(batch) if batch.kv is not None else None
        self.longest = max(batch.seq_lens)
        self.by_window: dict[int | None, list[Singles | Stack]] = {}

    def parts(self, window: int | None) -> list[Singles | Stack]:
        if window is not None and window >= self.longest:
            window = None
        if window not in self.by_window:
            cut = packed_parts if self.batch.kv is None else paged_parts
            self.by_window[window] = cut(self.batch, window)
        return self.by_window[window]


def attend(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, cache: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """Store k, v and attend, part by part. q, result: [T, Hq, D]; k, v: [T, Hkv, D]."""
    if cache is not None:
        store(plan, k, v, cache)
    parts = plan.parts(window)
    if len(parts) == 1:  # it has all the rows, in order
        return parts[0].attend(q, *gather(parts[0], k, v, cache), scale)
    out = torch.empty_like(q)
    for part in parts:
        out[part.rows] = part.attend(q[part.rows], *gather(part, k, v, cache), scale)
    return out


def store(plan: Plan, k: Tensor, v: Tensor, cache: Tensor) -> None:
    """Write k, v at the batch's slots."""
    slots = plan.batch.slots
    assert slots is not None
    if plan.fresh is not None:
        cache.index_fill_(1, plan.fresh, 0.0)
    cache[0].flatten(0, 1).index_copy_(0, slots, k.to(cache.dtype))
    cache[1].flatten(0, 1).index_copy_(0, slots, v.to(cache.dtype))


def gather(part: Singles | Stack, k: Tensor, v: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values of a part's requests, [n, L, Hkv, D]; views where the memory allows."""
    if cache is None or part.blocks is None:
        heads, dim = k.shape[1:]
        return k[part.rows].view(part.count, -1, heads, dim), v[part.rows].view(part.count, -1, heads, dim)
    return pick(cache[0], part, k.dtype), pick(cache[1], part, k.dtype)


def pick(side: Tensor, part: Singles | Stack, dtype: torch.dtype) -> Tensor:
    """One side [blocks, block_size, Hkv, D] of a cache → [n, L, Hkv, D]."""
    blocks = part.blocks
    found = side.index_select(0, blocks) if isinstance(blocks, Tensor) else side[blocks]
    found = found.view(part.count, -1, *side.shape[2:])[:, part.start : part.start + part.length]
    return found.to(dtype)


def fresh_blocks(batch: Batch) -> Tensor | None:
    """Blocks whose first places are written in this step and whose last ones are not.

    A padded call reads places that nobody has written yet. Their scores are masked, but 0 * NaN is NaN: what an
    earlier owner of the block left there must be wiped once.
    """
    assert batch.block_tables is not None
    size = batch.block_size
    found = []
    for i, (context, length) in enumerate(zip(batch.context_lens, batch.seq_lens, strict=True)):
        last = (length - 1) // size
        if length % size and last * size >= context:
            found.append(int(batch.block_tables[i, last]))
    return torch.tensor(found) if found else None


def packed_parts(batch: Batch, window: int | None) -> list[Singles | Stack]:
    """No cache: neighbours of equal length are stacked into one call."""
    parts: list[Singles | Stack] = []
    start = 0
    for length, run in groupby(batch.query_lens):
        count = len(list(run))
        rows = slice(start, start + count * length)
        parts.append(stack(rows, count, length, length, batch.causal, window))
        start = rows.stop
    return parts


def paged_parts(batch: Batch, window: int | None) -> list[Singles | Stack]:
    """With a cache: requests with one row together, the others each on its own."""
    parts: list[Singles | Stack] = []
    decoding = [i for i, rows in enumerate(batch.query_lens) if rows == 1]
    for group in grouped(decoding, batch.seq_lens, window):
        parts.append(one_request(batch, group[0], window) if len(group) == 1 else singles(batch, group, window))
    parts += [one_request(batch, i, window) for i, rows in enumerate(batch.query_lens) if rows > 1]
    return parts


def grouped(requests: list[int], lengths: list[int], window: int | None) -> list[list[int]]:
    """Cut requests into groups of like length, so that padding stays below CALL_COST a group; order kept inside."""
    seen = {i: lengths[i] if window is None else min(lengths[i], window) for i in requests}
    groups: list[list[int]] = []
    waste = 0
    for i in sorted(requests, key=seen.__getitem__, reverse=True):
        waste += seen[groups[-1][0]] - seen[i] if groups else 0
        if not groups or waste > CALL_COST:
            groups.append([])
            waste = 0
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def singles(batch: Batch, group: list[int], window: int | None) -> Singles:
    """Several requests with one row each."""
    assert batch.block_tables is not None
    size = batch.block_size
    ends = torch.tensor([batch.seq_lens[i] for i in group])[:, None]
    starts = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
    first = starts // size
    width = int(((ends - 1) // size - first).max()) + 1
    # Columns past a request's end repeat its first block, whose places are all finite.
    columns = torch.arange(width) + first
    columns = torch.where(columns * size < ends, columns, first)
    blocks = batch.block_tables[torch.tensor(group)].gather(1, columns).long()
    positions = torch.arange(width * size) + first * size
    seen = (positions >= starts) & (positions < ends)
    bias = None if bool(seen.all()) else torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None, None]
    rows = [batch.query_starts[i] for i in group]
    everything = len(group) == len(batch.query_lens)
    return Singles(
        rows=slice(None) if everything else torch.tensor(rows),
        count=len(group),
        blocks=blocks.flatten(),
        start=0,
        length=width * size,
        bias=bias,
    )


def one_request(batch: Batch, i: int, window: int | None) -> Singles | Stack:
    """One request with its exact keys: no padding."""
    assert batch.block_tables is not None
    rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
    count, context, length, size = batch.query_lens[i], batch.context_lens[i], batch.seq_lens[i], batch.block_size
    if context == 0:
        return stack(rows, 1, count, length, batch.causal, window)
    start = 0 if window is None else max(0, context - window + 1)
    first = start // size
    blocks = side_by_side(batch.block_tables[i, first : -(-length // size)].tolist())
    start -= first * size
    length -= first * size + start
    if count == 1:
        return Singles(rows=rows, count=1, blocks=blocks, start=start, length=length, bias=None)
    part = stack(rows, 1, count, length, batch.causal, window)
    part.blocks, part.start = blocks, start
    return part


def stack(rows: slice, count: int, queries: int, length: int, causal: bool, window: int | None) -> Stack:
    """`count` requests of `queries` rows that see the last of `length` keys."""
    if window is not None and window >= length:
        window = None
    plain = window is None and (queries == length or not causal)
    bias = None
    if not plain:
        seen = visible(queries, length, causal, window, torch.device("cpu"))
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    return Stack(rows, count, None, 0, length, bias, causal=causal and plain and queries > 1)


def side_by_side(blocks: list[int]) -> slice | Tensor:
    """A slice when the blocks follow one another in memory, so that reading them needs no copy."""
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0], blocks[0] + len(blocks))
    return torch.tensor(blocks)
