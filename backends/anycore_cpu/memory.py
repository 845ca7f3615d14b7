"""The machine's memory as the engine sees it: container limits count, and nothing has to be copied anywhere."""

from __future__ import annotations

import gc
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from anycore.contract.backend import KVSpec, Memory, Peak
from anycore.contract.host import memory_free, memory_total
from anycore.contract.rounded import TYPES, RoundedCache


class CpuMemory(Memory):
    def __init__(self, kernels: bool = False) -> None:
        """`kernels`: the cache is laid out for our own, else as the contract's default is."""
        super().__init__(torch.device("cpu"))
        self.kernels = kernels

    def total(self) -> int:
        return memory_total()

    def free(self) -> int:
        return memory_free()

    def held(self) -> int:
        """The storages of all tensors there are, each counted once: torch counts nothing on the CPU itself."""
        gc.collect()  # what is only waiting to be found
        sizes: dict[int, int] = {}
        for found in [some for some in gc.get_objects() if type(some) is Tensor]:
            with suppress(RuntimeError):  # what another thread is just making has no device or storage yet
                if found.is_mkldnn:  # opaque, and nobody else's
                    sizes[id(found)] = found.numel() * found.element_size()
                elif found.device.type == "cpu":
                    storage = found.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """The rise of the process's high-water mark; 0 where the block stayed below an earlier peak."""
        peak = Peak()
        start, earlier = psutil.Process().memory_info().rss, high_water()
        yield peak
        if high_water() > earlier:
            peak.bytes = max(0, high_water() - start)  # the kernel counts in batches: start may be a little ahead

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        """Of pages that the system zeroes when they are first written: a large pool costs no start-up time, and none of
        its memory before requests fill it.
        """
        shape: tuple[int, ...] = (2, blocks, kv.block_size, kv.kv_heads, kv.head_dim)
        if self.kernels:
            shape = (blocks, kv.kv_heads, 2, kv.block_size, kv.head_dim)
        if kv.rounded is not None:
            kind = TYPES[kv.rounded]
            return [RoundedCache(pages(shape, kind), pages(shape[:-1], torch.bfloat16)) for _ in range(kv.layers)]
        return [pages(shape, getattr(torch, kv.dtype)) for _ in range(kv.layers)]

    def upload(self, host: Tensor) -> Tensor:
        return host


def pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, of memory that is not there before it is written."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def high_water() -> int:
    """Most bytes this process ever had resident. macOS counts bytes, Linux KiB."""
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024
