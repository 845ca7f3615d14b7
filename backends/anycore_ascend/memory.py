"""One NPU's memory: a cache in the layout that its attention operator reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anycore.contract.backend import KVSpec
from anycore.contract.pinned import PinnedMemory


class AscendMemory(PinnedMemory):
    def block_bytes(self, kv: KVSpec) -> int:
        return super().block_bytes(replace(kv, head_dim=padded(kv.head_dim)))

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        """A tensor [2, blocks, block_size, Hkv, D] a layer; D is 64, 128 or more, the rest of it stays 0."""
        shape = (2, blocks, kv.block_size, kv.kv_heads, padded(kv.head_dim))
        dtype = getattr(torch, kv.dtype)
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(kv.layers)]


def padded(head_dim: int) -> int:
    """The head size of the cache: what the attention operator takes, 64 or 128, else the model's own."""
    return next((size for size in (64, 128) if head_dim <= size), head_dim)
