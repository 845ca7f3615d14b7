"""Host memory in the CUDA backend's layout, for its operations on a machine without a GPU."""

from __future__ import annotations

from typing import Any

from anycore.contract.backend import KVSpec, Memory
from anycore_cuda.cache import allocate


class HostMemory(Memory):
    def total(self) -> int:
        return 1 << 30

    def free(self) -> int:
        return 1 << 29

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        return list(allocate(kv, blocks, self.device))
