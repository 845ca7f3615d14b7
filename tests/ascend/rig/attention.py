"""References of the attention operators, with what their documentation and their users say about limits.

One name hides four kernels on the chip: `route` says which one a call reaches, as far as public sources tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rig.capture import RECORDER
from rig.chip import has_fused_infer_attention
from rig.limits import need

HALVES = (torch.float16, torch.bfloat16)
COMPRESSED = 2048
BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [R, N, D], k and v [L, Nkv, D], hidden [R, L] True = not seen → rows [R, N, D] and scores [N, R, L]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q.float(), keys) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    rows = torch.einsum("nqk,knd->qnd", scores.softmax(-1).nan_to_num(0.0), values)
    return rows.to(q.dtype), scores


@cache
def compressed_mask() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.int8).triu(1)


def words(mask: Tensor) -> Tensor:
    """Eight bytes at a time, which compares faster."""
    return mask.view(torch.int8).flatten().view(torch.int64)


def check_mask(mode: int, mask: Tensor | None) -> None:
    """Modes 2, 3 and 4 take one fixed mask whatever the lengths are, and 1 means hidden."""
    need(mode in (0, 1, 2, 3, 4), f"sparse_mode {mode} is not one of 0 … 4")
    if mask is not None:
        need(
            mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}, not bool, int8 or uint8"
        )
        need(mask.is_contiguous(), "atten_mask must be contiguous")
    if mode in (2, 3, 4):
        need(mask is not None, f"sparse_mode {mode} needs atten_mask")
        assert mask is not None
        need(
            mask.shape[-2:] == (COMPRESSED, COMPRESSED),
            f"sparse_mode {mode}: atten_mask {tuple(mask.shape)}, not 2048²",
        )
        exact = torch.equal(
            mask.view(torch.int8).flatten().view(torch.int64), compressed_mask().flatten().view(torch.int64)
        )
        need(exact, "atten_mask of modes 2 to 4 is 1 (hidden) strictly above the diagonal and 0 elsewhere")


def hidden(mode: int, rows: int, keys: int, mask: Tensor | None, before: int, after: int) -> Tensor | None:
    """What a mode hides from `rows` queries over `keys` keys."""
    if mode == 3 and rows == 1:
        return None  # the last query sees every key
    distance = torch.arange(keys) - torch.arange(rows)[:, None]  # how far a key lies after a query, both from 0
    if mode in (0, 1):
        if mask is None:
            need(mode == 0, "sparse_mode 1 needs the whole atten_mask")
            return None
        whole = mask.bool().reshape(-1, *mask.shape[-2:])[0]
        need(whole.shape[0] >= rows and whole.shape[1] >= keys, f"atten_mask {tuple(mask.shape)} for {rows} x {keys}")
        whole = whole[:rows, :keys]
        return whole if mode == 1 else whole | (distance > after) | (distance < -before)
    if mode == 2:
        return distance > 0
    shift = keys - rows  # modes 3 and 4 let the last query see the last key
    if mode == 3:
        return distance > shift
    return (distance > shift + after) | (distance < shift - before)


@dataclass
class Fused:
    """Arguments of npu_fused_infer_attention_score, in version 1's or version 2's names."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    query_lens: list[int] | None
    key_lens: list[int] | None
    table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    layout: str
    mode: int
    block_size: int
    inner_precise: int
    with_lse: bool
    other: list[str]  # names of further arguments that were given

    @classmethod
    def of(cls, a: dict[str, Any]) -> Fused:
        second = "softmax_scale" in a
        known = {"query", "key", "value", "atten_mask", "block_table", "workspace", "out"}
        known |= {"actual_seq_qlen", "actual_seq_kvlen", "actual_seq_lengths", "actual_seq_lengths_kv"}
        heads = a["num_query_heads" if second else "num_heads"]
        return cls(
            query=a["query"],
            key=a["key"],
            value=a["value"],
            mask=a["atten_mask"],
            query_lens=a["actual_seq_qlen" if second else "actual_seq_lengths"],
            key_lens=a["actual_seq_kvlen" if second else "actual_seq_lengths_kv"],
            table=a["block_table"],
            heads=heads,
            kv_heads=a["num_key_value_heads"] or heads,
            scale=a["softmax_scale" if second else "scale"],
            before=a["pre_tokens"],
            after=a["next_tokens"],
            layout=a["input_layout"],
            mode=a["sparse_mode"],
            block_size=a["block_size"],
            inner_precise=a["inner_precise"],
            with_lse=a["return_softmax_lse" if second else "softmax_lse_flag"],
            other=[name for name, x in a.items() if name not in known and isinstance(x, Tensor)],
        )

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of keys and of values."""
        if self.key.dim() == 3 and self.table is not None:
            return self.key.shape[2] // self.kv_heads, self.value.shape[2] // self.kv_heads
        return self.key.shape[-1], self.value.shape[-1]


def route(a: Fused) -> str:
    """Which of the kernels takes a TND call on A2 and A3 (CANN 8.5), or why none does."""
    size, (key_dim, value_dim) = a.query.shape[2], a.head_dims
    grouped = a.heads != a.kv_heads
    plain = a.mode in (0, 3) and size == key_dim == value_dim
    paged_well = a.table is None or (a.key.dim() == 3 and a.block_size == BLOCK)
    if grouped and a.inner_precise == 0 and plain and paged_well and size in (64, 128, 192, 256):
        return "split fuse"
    if (size, value_dim) in ((64, 64), (128, 128), (192, 128)):
        return "v3"
    need(
        a.query.dtype == torch.bfloat16, "TND with this head size reaches the prompt kernel, which takes bfloat16 only"
    )
    need(size in (64, 128, 192), f"561002: TND head size must be 192, 128 or 64, not {size}")
    return "prompt"


def fused_infer_attention(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score in layout TND, the only one that the backend uses."""
    a = Fused.of(arguments)
    need(has_fused_infer_attention(), "561002: this chip has no npu_fused_infer_attention_score")
    need(a.layout == "TND", f"the rig has no reference for input_layout {a.layout}")
    need(not a.other, f"the rig has no reference for {', '.join(a.other)}")
    check_tensors(a)
    check_mask(a.mode, a.mask)
    need(a.mode in (0, 3, 4), f"TND takes sparse_mode 0, 3 and 4, not {a.mode}")
    need((a.mask is None) == (a.mode == 0), "TND: sparse_mode 0 takes no atten_mask, 3 and 4 need one")
    lengths = query_lengths(a)
    histories = histories_of(a, lengths)
    route(a)
    rows, sums = [], []
    for q, (k, v) in zip(a.query.split(lengths), histories, strict=True):
        unseen = hidden(a.mode, len(q), len(k), a.mask, a.before, a.after)
        out, scores = attend(q, k, v, a.scale, unseen)
        rows.append(out)
        if a.with_lse:
            sums.append(scores.logsumexp(-1).T)
    return torch.cat(rows), torch.cat(sums)[..., None].float() if a.with_lse else torch.zeros(1)


def check_tensors(a: Fused) -> None:
    need(a.query.dtype in HALVES, f"query is {a.query.dtype}, not float16 or bfloat16")
    need(a.key.dtype == a.value.dtype == a.query.dtype, "query, key and value differ in dtype")
    for name, tensor in (("query", a.query), ("key", a.key), ("value", a.value)):
        need(tensor.is_contiguous(), f"{name} must be contiguous")
    need(a.query.dim() == 3 and a.query.shape[1] == a.heads, f"query {tuple(a.query.shape)} with num_heads {a.heads}")
    need(a.heads <= 256, f"num_heads {a.heads}, at most 256")
    need(a.heads % a.kv_heads == 0 and a.heads // a.kv_heads <= 64, f"{a.heads} heads over {a.kv_heads} KV heads")


def query_lengths(a: Fused) -> list[int]:
    """Rows of each request, from the cumulative list."""
    need(a.query_lens is not None and a.key_lens is not None, "TND needs both lists of lengths")
    assert a.query_lens is not None
    assert a.key_lens is not None
    count = len(a.query_lens)
    need(0 < count <= 4096, f"TND takes 1 to 4096 requests, not {count}")
    need(count == len(a.key_lens), f"{count} query lengths and {len(a.key_lens)} key lengths")
    return cumulative(a.query_lens, len(a.query), "query")


def cumulative(ends: Sequence[int], total: int, what: str) -> list[int]:
    steps = [end - start for start, end in pairwise([0, *ends])]
    kept = min(steps) >= 0 and ends[-1] == total
    need(kept, f"TND {what} lengths are cumulative and end at {total}, not {list(ends)[:8]}")
    return steps


def histories_of(a: Fused, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each request: cut from TND, or gathered from the blocks of a cache."""
    assert a.key_lens is not None
    if a.table is None:
        counts = cumulative(a.key_lens, len(a.key), "key")
        found = list(zip(a.key.split(counts), a.value.split(counts), strict=True))
    else:
        check_table(a, len(lengths))
        found = [
            (paged(a, a.key, row, count), paged(a, a.value, row, count))
            for row, count in zip(a.table, a.key_lens, strict=True)
        ]
    short = [i for i, (k, _) in enumerate(found) if len(k) < lengths[i]]
    need(not short or a.mode != 3, f"sparse_mode 3: requests {short} have more queries than keys")
    return found


def check_table(a: Fused, requests: int) -> None:
    assert a.table is not None
    assert a.key_lens is not None
    need(a.table.dtype == torch.int32 and a.table.dim() == 2, f"block_table is {a.table.dtype}, not int32 [B, P]")
    need(a.table.is_contiguous(), "block_table must be contiguous")
    need(len(a.table) == requests, f"block_table has {len(a.table)} rows for {requests} requests")
    need(a.key.dim() == 3, f"TND pages are [blocks, block, KV heads * D], not {tuple(a.key.shape)}")
    need(a.key.shape[1] == a.block_size, f"block_size {a.block_size} over blocks of {a.key.shape[1]}")
    need(a.block_size == BLOCK, f"block_size {a.block_size}: only 128 is known to be right (16 returned garbage on A3)")
    most = a.table.shape[1] * a.block_size
    need(min(a.key_lens) >= 1, "a key length with block_table counts one request's keys and is at least 1")
    need(max(a.key_lens) <= most, f"key length {max(a.key_lens)} in {a.table.shape[1]} blocks: lengths are per request")


def paged(a: Fused, cache: Tensor, row: Tensor, count: int) -> Tensor:
    """[count, Nkv, D]: the first tokens of one request."""
    blocks = row[: -(-count // a.block_size)].long()
    inside = int(blocks.min()) >= 0 and int(blocks.max()) < len(cache)
    need(inside, f"block_table names a block outside of {len(cache)}")
    return cache[blocks].reshape(-1, a.kv_heads, cache.shape[2] // a.kv_heads)[:count]


def fusion_attention(a: dict[str, Any]) -> tuple[Any, ...]:
    """npu_fusion_attention in layout TND: no cache, both lists cumulative, every row sees what the mode shows."""
    q, k, v, heads, mask, mode = (
        a[name] for name in ("query", "key", "value", "head_num", "atten_mask", "sparse_mode")
    )
    need(not RECORDER.capturing, "npu_fusion_attention cannot be captured")
    need(a["input_layout"] == "TND", f"the rig has no reference for input_layout {a['input_layout']}")
    need(a["keep_prob"] == 1, "dropout while serving")
    need(q.dtype == k.dtype == v.dtype, "query, key and value differ in dtype")
    need(q.dtype in (*HALVES, torch.float32), f"query is {q.dtype}")
    need(all(x.is_contiguous() for x in (q, k, v)), "query, key and value must be contiguous")
    need(q.shape[1] == heads and q.shape[1] % k.shape[1] == 0, f"head_num {heads} with query {tuple(q.shape)}")
    need(1 <= q.shape[2] <= 768, f"head size {q.shape[2]}, at most 768")
    ends, key_ends = a["actual_seq_qlen"], a["actual_seq_kvlen"]
    need(bool(ends) and bool(key_ends), "TND needs both lists of lengths")
    need(len(ends) == len(key_ends) <= 2048, f"{len(ends)} query and {len(key_ends)} key lengths, at most 2048")
    check_mask(mode, mask)
    rows = []
    lengths, counts = cumulative(ends, len(q), "query"), cumulative(key_ends, len(k), "key")
    for own, keys, values in zip(q.split(lengths), k.split(counts), v.split(counts), strict=True):
        unseen = hidden(mode, len(own), len(keys), mask, a["pre_tockens"], a["next_tockens"])
        rows.append(attend(own, keys, values, a["scale"], unseen)[0])
    statistics = torch.zeros(len(q), heads, 8)
    return torch.cat(rows), statistics, statistics.clone(), torch.empty(0, dtype=q.dtype), 0, 0, 0


def workspace(a: dict[str, Any]) -> Tensor:
    """_npu_fused_infer_attention_score_get_max_workspace, called by torch_npu itself while it captures."""
    return torch.empty(1, dtype=torch.uint8)


def infer_output(a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """_npu_fused_infer_attention_score_infer_output, likewise."""
    return torch.empty_like(a["query"]), torch.zeros(1)
