"""Attention on a CPU: few large calls of torch's flash kernel instead of one small call a request.

`Plan` looks at a batch once a step and cuts it into parts; `attend` runs them in every layer. The cache keeps the
contract's default layout [2, blocks, block_size, Hkv, D]: a block is one run of memory, so gathering a request's
blocks is one copy, or none when they are neighbours, and torch's kernel takes the heads as a stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch

CALL_COST = 512
"""Padded key places that cost as much as one more call, measured: more padding than this splits a group."""

ALIGNED = 16
"""Keys come in multiples of this: torch's kernel takes up to twice as long for a row that ends within a vector."""

Blocks = slice | Tensor
"""Blocks of a cache: a slice when they lie side by side, so that reading them needs no copy."""


@dataclass(slots=True)
class Decode:
    """Requests with one row each, padded to the longest: the query heads of a group become the kernel's rows."""

    rows: slice | Tensor  # [n] rows of the batch
    count: int
    blocks: Blocks  # n times as many as the longest has
    keys: slice  # of those places: all, but the exact ones of a request alone
    bias: Tensor | None  # [n, 1, 1, L] float32: 0 or -inf

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, scale: float) -> Tensor:
        """[n, Hq, D] → [n, Hq, D]."""
        keys, values = (pick(side, self.blocks, self.count, q.dtype)[:, self.keys].transpose(1, 2) for side in cache)
        grouped = q.view(self.count, keys.shape[1], -1, q.shape[2])
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.bias, scale=scale)
        return out.reshape(q.shape)


@dataclass(slots=True)
class Prompt:
    """One request with several rows, which reads all its keys back from the cache, in whole blocks."""

    rows: slice
    blocks: Blocks
    bias: Tensor | None  # [Q, L] float32; None: the kernel's own causal mask, or none at all
    causal: bool  # row t sees keys 0 … t: there is no history

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, scale: float) -> Tensor:
        """[Q, Hq, D] → [Q, Hq, D]."""
        keys, values = (pick(side, self.blocks, 1, q.dtype) for side in cache)
        return flash(q[None], keys, values, self.bias, self.causal, scale)[0]


@dataclass(slots=True)
class Packed:
    """Neighbours of about the same length, without a cache, stacked to [n, L]."""

    rows: slice
    count: int
    spread: Tensor | None  # [n * L] rows of the part; None: all are L long, a view will do
    back: Tensor | None  # [rows] places in n * L
    bias: Tensor | None  # broadcasts to [n, 1, L, L]
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, scale: float) -> Tensor:
        """[rows, Hq, D] → [rows, Hq, D]; k and v are the same rows."""
        if self.spread is not None:
            q, k, v = (x.index_select(0, self.spread) for x in (q, k, v))
        q, k, v = (x.view(self.count, -1, *x.shape[1:]) for x in (q, k, v))
        out = flash(q, k, v, self.bias, self.causal, scale).flatten(0, 1)
        return out if self.back is None else out.index_select(0, self.back)


Part = Decode | Prompt | Packed


class Plan:
    """What one step needs in every layer. Parts are made when a window is first seen: most models have one or two."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.fresh = fresh_blocks(batch) if batch.kv is not None else None
        self.longest = max(batch.seq_lens)
        self.by_window: dict[int | None, list[Part]] = {}

    def parts(self, window: int | None) -> list[Part]:
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
        return parts[0].attend(q, k, v, cache, scale)
    out = torch.empty(q.shape, dtype=q.dtype)
    for part in parts:
        rows = part.rows
        out[rows] = part.attend(q[rows], k[rows], v[rows], cache, scale)
    return out


def flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """q [n, Q, Hq, D], k and v [n, L, Hkv, D] → [n, Q, Hq, D]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def store(plan: Plan, k: Tensor, v: Tensor, cache: Tensor) -> None:
    """Write k, v at the batch's slots."""
    slots = plan.batch.slots
    assert slots is not None
    if plan.fresh is not None:
        cache.index_fill_(1, plan.fresh, 0.0)
    for side, rows in zip(cache, (k, v), strict=True):
        side.flatten(0, 1).index_copy_(0, slots, rows.to(side.dtype))


def pick(side: Tensor, blocks: Blocks, count: int, dtype: torch.dtype) -> Tensor:
    """Blocks of one side [blocks, block_size, Hkv, D] of a cache, for `count` requests → [n, L, Hkv, D]."""
    found = side[blocks] if isinstance(blocks, slice) else side.index_select(0, blocks)
    return found.view(count, -1, *side.shape[2:]).to(dtype)


def fresh_blocks(batch: Batch) -> Tensor | None:
    """Blocks whose first places are written in this step and whose last ones are not.

    Whole blocks are read, with places that nobody has written yet. Their scores are masked, but 0 * NaN is NaN: what
    an earlier owner of the block left there must be wiped once.
    """
    assert batch.block_tables is not None
    size = batch.block_size
    found = []
    for i, (context, length) in enumerate(zip(batch.context_lens, batch.seq_lens, strict=True)):
        last = (length - 1) // size
        if length % size and last * size >= context:
            found.append(int(batch.block_tables[i, last]))
    return torch.tensor(found) if found else None


def packed_parts(batch: Batch, window: int | None) -> list[Part]:
    """No cache: neighbours that are equally long when rounded up are stacked into one call."""
    parts: list[Part] = []
    start = 0
    for width, run in groupby(batch.query_lens, lambda length: -(-length // ALIGNED) * ALIGNED):
        lengths = list(run)
        parts.append(packed(slice(start, start + sum(lengths)), lengths, width, batch.causal, window))
        start += sum(lengths)
    return parts


def packed(rows: slice, lengths: list[int], width: int, causal: bool, window: int | None) -> Packed:
    """A stack of requests of up to `width` rows."""
    places = torch.arange(width)
    ends = torch.tensor(lengths)[:, None]
    even = all(length == width for length in lengths)
    if window is None and not causal:
        seen = (places < ends)[:, None, None]  # the same for every row
    elif even or causal:
        seen = visible(places, places, causal, window)  # a causal row never reaches the padding
    else:
        seen = (visible(places, places, False, window) & (places < ends)[:, None])[:, None]
    plain = window is None and (even or causal)
    spread = back = None
    if not even:
        spread = (ends.cumsum(0) - ends + torch.minimum(places, ends - 1)).flatten()  # padding repeats the last row
        back = (places < ends).flatten().nonzero()[:, 0]
    return Packed(rows, len(lengths), spread, back, None if plain else bias_of(seen), causal and plain)


def paged_parts(batch: Batch, window: int | None) -> list[Part]:
    """With a cache: requests with one row together, the others each on its own."""
    decoding = [i for i, rows in enumerate(batch.query_lens) if rows == 1]
    groups = grouped(decoding, batch.seq_lens, window)
    parts: list[Part] = [decode_one(batch, g[0], window) if len(g) == 1 else decode(batch, g, window) for g in groups]
    return parts + [prompt(batch, i, window) for i, rows in enumerate(batch.query_lens) if rows > 1]


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


def decode(batch: Batch, group: list[int], window: int | None) -> Decode:
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
    places = torch.arange(width * size) + first * size
    seen = (places >= starts) & (places < ends)
    bias = None if bool(seen.all()) else bias_of(seen[:, None, None])
    everything = len(group) == len(batch.query_lens)
    rows = slice(None) if everything else torch.tensor([batch.query_starts[i] for i in group])
    return Decode(rows, len(group), blocks.flatten(), slice(None), bias)


def decode_one(batch: Batch, i: int, window: int | None) -> Decode:
    """One request with one row and exactly its keys: nothing is padded or masked."""
    end = batch.seq_lens[i]
    start = 0 if window is None else max(0, end - window)
    first = start // batch.block_size
    keys = slice(start - first * batch.block_size, end - first * batch.block_size)
    return Decode(rows_of(batch, i), 1, blocks_of(batch, i, first), keys, None)


def prompt(batch: Batch, i: int, window: int | None) -> Prompt:
    """One request with several rows; with a window, blocks that none of them sees are left out."""
    context, end, size = batch.context_lens[i], batch.seq_lens[i], batch.block_size
    if window is not None and window >= end:
        window = None
    first = 0 if window is None else max(0, context - window + 1) // size
    rows, blocks = rows_of(batch, i), blocks_of(batch, i, first)
    if batch.causal and context == 0 and window is None:
        return Prompt(rows, blocks, None, causal=True)
    places = torch.arange(first * size, -(-end // size) * size)
    seen = visible(torch.arange(context, end), places, batch.causal, window) & (places < end)
    return Prompt(rows, blocks, bias_of(seen), causal=False)


def rows_of(batch: Batch, i: int) -> slice:
    return slice(batch.query_starts[i], batch.query_starts[i + 1])


def blocks_of(batch: Batch, i: int, first: int) -> Blocks:
    """Blocks of request i from its `first` one on."""
    assert batch.block_tables is not None
    blocks = batch.block_tables[i, first : -(-batch.seq_lens[i] // batch.block_size)].tolist()
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        return slice(blocks[0], blocks[0] + len(blocks))
    return torch.tensor(blocks)


def visible(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Tensor:
    """[Q], [L] positions → [Q, L] bool."""
    distance = queries[:, None] - keys
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def bias_of(seen: Tensor) -> Tensor:
    """What is added to scores: 0 where seen, else -inf. float32 whatever the dtype: the kernel adds in float32."""
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
