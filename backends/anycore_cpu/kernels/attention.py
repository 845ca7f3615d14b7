"""Attention by our own kernel: what one call is told, the same for prompts, decoding and encoders.

The cache is [blocks, Hkv, K and V, block_size, D] a layer: what one head reads of a block is one run of memory.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import HeadNorms

ADDRESSES = ("q", "k", "v", "out", "cache", "slots", "tables", "starts", "lengths", "q_norm", "k_norm", "cos", "sin")
STRIDES = ("q_stride", "k_stride", "v_stride", "table_stride")
SIZES = ("rows", "requests", "heads", "kv_heads", "head_dim", "block_size", "window")

DTYPES = (torch.float32, torch.bfloat16)


class Arguments(ctypes.Structure):
    """`struct Attention` of attention.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, ctypes.c_int64) for name in (*STRIDES, *SIZES)),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "eps")),
        *((name, ctypes.c_int32) for name in ("causal", "wide")),
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
        return {
            "starts": self.starts.data_ptr(),
            "lengths": self.lengths.data_ptr(),
            "slots": address(self.slots),
            "tables": address(self.tables),
            "table_stride": 0 if self.tables is None else self.tables.shape[1],
            "rows": batch.query_starts[-1],
            "requests": len(batch.query_lens),
            "block_size": batch.block_size,
        }


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def arguments(
    plan: KernelPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cache: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    norms: HeadNorms | None,
    angles: tuple[Tensor, Tensor] | None,
) -> Arguments:
    """One layer's call. The tensors must outlive it, and have their heads side by side."""
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype or (cache is not None and cache.dtype != q.dtype):
        held = "" if cache is None else f", in a cache of {cache.dtype}"
        raise ValueError(f"attention takes q, k, v of one dtype, float32 or bfloat16: {q.dtype}, {k.dtype}{held}")
    return Arguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        cache=address(cache),
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
        **plan.common,
    )
