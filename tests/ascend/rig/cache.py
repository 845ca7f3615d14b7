"""References of the operators that write and read the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rig.limits import need

INTEGERS = (torch.int32, torch.int64)


def check_slots(slots: Tensor, rows: int, places: int) -> None:
    need(slots.dtype in INTEGERS and slots.dim() == 1, f"slots are {slots.dtype} {tuple(slots.shape)}, not int [T]")
    need(len(slots) == rows, f"{len(slots)} slots for {rows} rows")
    low, high = int(slots.min()), int(slots.max())
    need(low >= 0 and high < places, f"slots from {low} to {high} in a cache of {places}: -1 is never a slot")
    need(len(slots.unique()) == rows, "a slot is repeated: which of the rows stays is open")


def scatter(a: dict[str, Any]) -> None:
    """npu_scatter_pa_kv_cache into caches [blocks, block, N, D]."""
    key, value, keys, values = (a[name] for name in ("key", "value", "key_cache", "value_cache"))
    slots = a["slot_mapping"]
    need(a.get("cache_mode", "Norm") == "Norm", "caches [blocks, block, N, D] need cache_mode='Norm', not PA_NZ")
    store(key, value, keys, values, slots)


def reshape_and_cache(a: dict[str, Any]) -> None:
    """atb::_npu_reshape_and_cache, whose slots are int32."""
    need(a["slot_indices"].dtype == torch.int32, "slot_indices of ATB are int32")
    store(a["key"], a["value"], a["key_cache"], a["value_cache"], a["slot_indices"])


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    need(key.dim() == 3 and keys.dim() == 4, f"key {tuple(key.shape)} and cache {tuple(keys.shape)}, not 3-D and 4-D")
    need(key.shape[1:] == keys.shape[2:] and value.shape[1:] == values.shape[2:], "rows and cache differ in heads or D")
    need(key.dtype == value.dtype == keys.dtype == values.dtype, "key, value and caches differ in dtype")
    for name, tensor in (
        ("key", key),
        ("value", value),
        ("key_cache", keys),
        ("value_cache", values),
        ("slots", slots),
    ):
        need(tensor.is_contiguous(), f"{name} must be contiguous")
    check_slots(slots, len(key), keys.shape[0] * keys.shape[1])
    for rows, cache in ((key, keys), (value, values)):
        cache.view(-1, *cache.shape[2:])[slots.long()] = rows


def scatter_nd(a: dict[str, Any]) -> None:
    """npu_scatter_nd_update_ as caches use it: input [slots, N, D], indices [T, 1], updates [T, N, D]."""
    into, indices, updates = a["input"], a["indices"], a["updates"]
    need(indices.dim() == 2 and indices.shape[1] == 1, f"indices {tuple(indices.shape)}, not [T, 1]")
    need(updates.dim() == into.dim() == 3, "updates of four dimensions were refused at tiling: use [T, N, D]")
    need(into.dtype == updates.dtype, "input and updates differ in dtype")
    need(all(x.is_contiguous() for x in (into, indices, updates)), "input, indices and updates must be contiguous")
    check_slots(indices[:, 0].contiguous(), len(updates), len(into))
    into[indices[:, 0].long()] = updates


def gather(a: dict[str, Any]) -> None:
    """npu_gather_pa_kv_cache: the first seq_lens[i] tokens of each request, one request after the other."""
    tables, lengths = a["block_tables"], a["seq_lens"]
    need(tables.dtype == lengths.dtype == torch.int32, "block_tables and seq_lens are int32")
    need(not a["is_seq_lens_cumsum"] and a["seq_offset"] is None, "the rig gathers whole requests by their lengths")
    need(len(tables) == len(lengths), f"{len(tables)} rows of blocks for {len(lengths)} requests")
    for cache, out in ((a["key_cache"], a["key"]), (a["value_cache"], a["value"])):
        need(cache.is_contiguous() and out.is_contiguous(), "caches and outputs must be contiguous")
        rows = [cache[table.long()].flatten(0, 1)[:n] for table, n in zip(tables, lengths.tolist(), strict=True)]
        need(sum(map(len, rows)) == len(out), f"{len(out)} rows for {int(lengths.sum())} tokens")
        out.copy_(torch.cat(rows))
