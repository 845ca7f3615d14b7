"""Host memory in the CUDA backend's layout, for its operations on a machine without a GPU."""

from __future__ import annotations

import torch

from anycore.contract.backend import KVSpec, Memory


class HostMemory(Memory):
    def total(self) -> int:
        return 1 << 30

    def free(self) -> int:
        return 1 << 29

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[torch.Tensor]:
        shape = (2, blocks, kv.kv_heads, kv.block_size, kv.head_dim)
        return [torch.zeros(shape, dtype=getattr(torch, kv.dtype)) for _ in range(kv.layers)]
