"""One GPU's memory: what is free on it, and transfers through pinned buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Download, KVSpec, Memory, Peak

ALIGNMENT = 16
STAGED_FROM = 1 << 20
STAGE = 32 << 20


class CudaMemory(Memory):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stages: list[Stage] = []
        self._turn = 0

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def free(self) -> int:
        """What the driver has free, and what torch's allocator holds without using it."""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + cached

    def held(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak = Peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        start = torch.cuda.memory_allocated(self.device)
        yield peak
        peak.bytes = max(0, torch.cuda.max_memory_allocated(self.device) - start)

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        """A tensor [2, blocks, Hkv, block_size, D] a layer: what a program reads of a block is one run of memory."""
        shape = (2, blocks, kv.kv_heads, kv.block_size, kv.head_dim)
        dtype = getattr(torch, kv.dtype)
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(kv.layers)]

    def upload(self, host: Tensor) -> Tensor:
        if host.device == self.device:
            return host
        if host.nbytes >= STAGED_FROM and host.is_contiguous():
            return self._staged(host)
        # The allocator of pinned memory gives a block out again only after the copy from it has run.
        return host.pin_memory().to(self.device, non_blocking=True)

    def upload_all(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """One transfer: the tensors side by side in one buffer."""
        starts = [0]
        for host in hosts:
            starts.append(-(-(starts[-1] + host.nbytes) // ALIGNMENT) * ALIGNMENT)
        buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        places = buffer.numpy()  # torch takes longer to cut and copy such small pieces
        for host, start in zip(hosts, starts, strict=False):
            array = np.ascontiguousarray(host.numpy())
            places[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        there = buffer.to(self.device, non_blocking=True)
        return [
            there[start : start + host.nbytes].view(host.dtype).view(host.shape)
            for host, start in zip(hosts, starts, strict=False)
        ]

    def download(self, tensors: Sequence[Tensor]) -> Download:
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.device))

        def wait() -> list[Tensor]:
            arrived.synchronize()
            return hosts

        return wait

    def _staged(self, host: Tensor) -> Tensor:
        """A large tensor, through two pinned buffers in turn: one is filled while the other travels."""
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        source, target = host.view(-1).view(torch.uint8), there.view(-1).view(torch.uint8)
        for first in range(0, len(source), STAGE):
            self._next_stage().send(source[first : first + STAGE], target[first : first + STAGE])
        return there

    def _next_stage(self) -> Stage:
        if not self._stages:
            self._stages = [Stage(), Stage()]
        self._turn ^= 1
        return self._stages[self._turn]


class Stage:
    """A pinned buffer and the moment it may be written again."""

    def __init__(self) -> None:
        self.buffer = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True)
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, source: Tensor, target: Tensor) -> None:
        self.sent.synchronize()
        part = self.buffer[: len(source)].copy_(source)
        target.copy_(part, non_blocking=True)
        self.sent.record()
