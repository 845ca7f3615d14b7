"""Attention by our own kernel: what one call is told, the same for prompts, decoding and encoders.

The cache is [blocks, Hkv, K and V, block_size, D] a layer: what one head reads of a block is one run of memory. A
rounded one has its scales beside it, [blocks, Hkv, K and V, block_size].
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import HeadNorms
from anycore.contract.rounded import RoundedCache

ADDRESSES = (
    *("q", "k", "v", "out", "cache", "scales", "slots", "tables", "starts", "lengths"),
    *("q_norm", "k_norm", "cos", "sin"),
)
STRIDES = ("q_stride", "k_stride", "v_stride", "table_stride")
SIZES = ("rows", "requests", "heads", "kv_heads", "head_dim", "block_size", "window")

DTYPES = (torch.float32, torch.bfloat16)
ROUNDINGS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Of a cache that is rounded: `Rounding` of rounded.hpp."""


class Arguments(ctypes.Structure):
    """`struct Attention` of attention.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, ctypes.c_int64) for name in (*STRIDES, *SIZES)),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "eps")),
        *((name, ctypes.c_int32) for name in ("causal", "wide", "rounding")),
    )


class KernelPlan:
    """What all layers of a step have in common, kept where the kernel reads it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @cached_property
    def common(self) -> dict[str, Any]:
        """Made by the first layer: a step that is replayed has no use for it."""
        batch = self.batch
        self.starts = batch.query_starts_device
        self.lengths = batch.seq_lens_device if batch.kv is not None else torch.tensor(batch.query_lens).int()
        self.slots = None if batch.slots is None else batch.slots.contiguous()
        self.tables = None if batch.block_tables is None else batch.block_tables.contiguous()
        requests, rows = len(batch.query_lens), batch.query_starts[-1]
        expect("query starts", self.starts, torch.int32, requests + 1)
        expect("lengths", self.lengths, torch.int32, requests)
        expect("slots", self.slots, torch.int64, rows)
        expect("block tables", self.tables, torch.int32, requests, 0 if self.tables is None else self.tables.shape[1])
        return {
            "starts": self.starts.data_ptr(),
            "lengths": self.lengths.data_ptr(),
            "slots": address(self.slots),
            "tables": address(self.tables),
            "table_stride": 0 if self.tables is None else self.tables.shape[1],
            "rows": rows,
            "requests": requests,
            "block_size": batch.block_size,
        }


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def expect(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Refuse what a kernel would read as something else than it is.

    Raises:
        ValueError: with the two dtypes and shapes.
    """
    if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
        held = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"{name}: the kernel reads {dtype} {shape}, and was given {held}")


def check_layer(
    plan: KernelPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Tensor | RoundedCache | None,
    window: int | None,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,
) -> None:
    """Refuse a call whose tensors do not belong together: the kernel would read beside them."""
    rows, dim, kv_heads = plan.common["rows"], q.shape[-1], k.shape[-2]
    if q.dtype not in DTYPES:
        raise ValueError(f"attention takes float32 or bfloat16, not {q.dtype}")
    if q.dim() != 3 or kv_heads < 1 or q.shape[1] % kv_heads != 0 or dim < 1:
        raise ValueError(f"attention takes q [rows, heads, D] and fewer heads of k: {tuple(q.shape)}, {tuple(k.shape)}")
    expect("q", q, q.dtype, rows, q.shape[1], dim)
    expect("k", k, q.dtype, rows, kv_heads, dim)
    expect("v", v, q.dtype, rows, kv_heads, dim)
    if any(x.stride()[1:] != (dim, 1) and x.numel() > 0 for x in (q, k, v)):
        raise ValueError(
            f"heads of one row lie side by side, {(dim, 1)} apart: {q.stride()}, {k.stride()}, {v.stride()}"
        )
    if cache is not None:
        rounded = isinstance(cache, RoundedCache)
        data = cache.data if isinstance(cache, RoundedCache) else cache
        parts = [data, cache.scale] if isinstance(cache, RoundedCache) else [data]
        if rounded and data.dtype not in ROUNDINGS:
            raise ValueError(f"a rounded cache is of int8 or float8_e4m3fn, not of {data.dtype}")
        shape = (len(data), kv_heads, 2, plan.batch.block_size)
        expect("scales", parts[1] if rounded else None, torch.bfloat16, *shape)
        expect("cache", data, data.dtype if rounded else q.dtype, *shape, dim)
        if plan.slots is None or plan.tables is None or not all(part.is_contiguous() for part in parts):
            raise ValueError("a cache is one run of memory, and is used with slots and block tables")
    if window is not None and window < 1:
        raise ValueError(f"window: at least 1 token, not {window}")
    if norms is not None:
        expect("q_norm", norms[0], torch.float32, dim)
        expect("k_norm", norms[1], torch.float32, dim)
    if angles is not None:
        expect("cos", angles[0], torch.float32, rows, dim // 2)
        expect("sin", angles[1], torch.float32, rows, dim // 2)


def arguments(
    plan: KernelPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cache: Tensor | RoundedCache | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,
) -> Arguments:
    """One layer's call. The tensors must outlive it, and have their heads side by side."""
    check_layer(plan, q, k, v, cache, window, norms, angles)
    return Arguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        cache=address(cache.data if isinstance(cache, RoundedCache) else cache),
        scales=address(cache.scale) if isinstance(cache, RoundedCache) else None,
        q_norm=None if norms is None else norms[0].data_ptr(),
        k_norm=None if norms is None else norms[1].data_ptr(),
        cos=None if angles is None else angles[0].data_ptr(),
        sin=None if angles is None else angles[1].data_ptr(),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
        eps=0.0 if norms is None else norms[2],
        causal=plan.batch.causal,
        wide=q.dtype == torch.float32,
        rounding=ROUNDINGS[cache.dtype] if isinstance(cache, RoundedCache) else 0,
        **plan.common,
    )
