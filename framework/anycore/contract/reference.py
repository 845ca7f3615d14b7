"""Attention and rotation in plain torch: slow, short, and what every kernel is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.rounded import RoundedCache, round_rows

Cache = Tensor | RoundedCache
"""[2, blocks, block_size, Hkv, D], keys and then values, as they come or rounded."""


def store(k: Tensor, v: Tensor, cache: Cache, batch: Batch) -> None:
    """Write rows k, v [T, Hkv, D] at `batch.slots`."""
    assert batch.slots is not None
    for side, rows in zip((0, 1), (k, v), strict=True):
        if isinstance(cache, RoundedCache):
            data, scale = round_rows(rows, cache.data.dtype)
            # As bytes: torch copies those of any type by index.
            cache.data[side].view(torch.uint8).flatten(0, 1).index_copy_(0, batch.slots, data.view(torch.uint8))
            cache.scale[side].flatten(0, 1).index_copy_(0, batch.slots, scale)
        else:
            cache[side].flatten(0, 1).index_copy_(0, batch.slots, rows.to(cache.dtype))


def stored(cache: Cache, side: int, blocks: Tensor) -> Tensor:
    """What some blocks hold of keys (side 0) or values (1): [blocks * block_size, Hkv, D], in float32 if rounded."""
    if isinstance(cache, RoundedCache):
        data = cache.data[side].view(torch.uint8)[blocks].view(cache.data.dtype)
        return (data.float() * cache.scale[side][blocks].float()[..., None]).flatten(0, 1)
    return cache[side][blocks].flatten(0, 1)


def paged_attention(
    q: Tensor, cache: Cache, batch: Batch, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend to what the cache holds for each request. q, result: [T, Hq, D]."""
    out = torch.empty_like(q)
    assert batch.block_tables is not None
    for i, rows in enumerate(batch.query_lens):
        start = batch.query_starts[i]
        length = batch.seq_lens[i]
        blocks = batch.block_tables[i, : -(-length // batch.block_size)].long()
        k, v = (stored(cache, side, blocks)[:length] for side in (0, 1))
        out[start : start + rows] = attend(q[start : start + rows], k, v, scale, batch.causal, window, softcap)
    return out


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend within each request's own rows; there is no history. q, result: [T, Hq, D]; k, v: [T, Hkv, D]."""
    out = torch.empty_like(q)
    for i, rows in enumerate(batch.query_lens):
        start = batch.query_starts[i]
        here = slice(start, start + rows)
        out[here] = attend(q[here], k[here], v[here], scale, batch.causal, window, softcap)
    return out


def padded_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """`packed_attention` by torch's own operator, over requests padded to one length.

    The mask is of bools: many devices have a fused kernel for these and none for floats.
    """
    lens = torch.tensor(batch.query_lens)
    longest = int(lens.max())
    inside = torch.arange(longest) < lens[:, None]
    rows = inside.flatten().nonzero()[:, 0].to(q.device)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))

    def spread(x: Tensor) -> Tensor:
        wide = x.new_zeros(len(lens) * longest, *x.shape[1:])
        return wide.index_copy_(0, rows, x).view(len(lens), longest, *x.shape[1:]).transpose(1, 2)

    distance = torch.arange(longest)[:, None] - torch.arange(longest)
    seen = inside[:, None, None, :].expand(-1, 1, longest, -1)
    if batch.causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    # A row of padding would see nothing where a window ends before the text does; softmax of nothing is NaN.
    seen = seen | torch.eye(longest, dtype=torch.bool)
    out = F.scaled_dot_product_attention(spread(q), spread(k), spread(v), attn_mask=seen.to(q.device), scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None
) -> Tensor:
    """One request: q [Q, Hq, D] are the last Q of the L positions in k, v [L, Hkv, D]. Returns [Q, Hq, D]."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    grouped = q.float().view(rows, kv_heads, group, dim)
    scores = torch.einsum("qhgd,lhd->hgql", grouped, k.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible(rows, length, causal, window, q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    out = torch.einsum("hgql,lhd->qhgd", scores.softmax(-1), v.float())
    return out.reshape(rows, heads, dim).to(q.dtype)


def visible(rows: int, length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """[Q, L] bool: which positions each of the last Q rows may see.

    Without `causal`, a window W reaches W - 1 positions to either side, as in Hugging Face's bidirectional masks.
    """
    query = torch.arange(length - rows, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    mask = key <= query if causal else torch.ones(rows, length, dtype=torch.bool, device=device)
    if window is not None:
        mask = mask & (query - key < window) & (key - query < window)
    return mask


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[d], x[d + D/2]) of x [T, heads, D] by angles given as cos, sin [T, D/2] float32.

    Rotary position embedding: Su et al., 2021.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def pool(rows: Tensor, counts: list[int], kind: str) -> Tensor:
    """Reduce rows [sum(counts), H], packed by request, to one float32 row a request [B, H].

    "cls" and "last" expect the one wanted row a request; "mean" and "max" reduce all of its rows. There is no
    padding to leave out.
    """
    wide = rows.float()
    if kind in ("cls", "last"):
        return wide
    parts = torch.split(wide, counts)
    if kind == "mean":
        return torch.stack([part.mean(0) for part in parts])
    if kind == "max":
        return torch.stack([part.amax(0) for part in parts])
    raise ValueError(f"pooling {kind!r} is not one of cls, mean, max, last")
