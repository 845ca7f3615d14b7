"""How a layer's KV cache lies in memory: what a program reads of a block is one run."""

from __future__ import annotations

import torch
from torch import Tensor

from anycore.contract.backend import KVSpec
from anycore.contract.rounded import TYPES, RoundedCache


def allocate(kv: KVSpec, blocks: int, device: torch.device) -> list[Tensor | RoundedCache]:
    """A tensor [2, blocks, Hkv, block_size, D] a layer; rounded, with scales [2, blocks, Hkv, block_size]."""
    shape = (2, blocks, kv.kv_heads, kv.block_size, kv.head_dim)

    def layer() -> Tensor | RoundedCache:
        if kv.rounded is None:
            return torch.zeros(shape, dtype=getattr(torch, kv.dtype), device=device)
        data = torch.zeros(shape, dtype=TYPES[kv.rounded], device=device)
        return RoundedCache(data, torch.zeros(shape[:-1], dtype=torch.bfloat16, device=device))

    return [layer() for _ in range(kv.layers)]
