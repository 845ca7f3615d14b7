"""One GPU's memory: its cache, and transfers that do better than the contract's pinned ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import KVSpec
from anycore.contract.pinned import PinnedMemory
from anycore_cuda.cache import allocate

STAGED_FROM = 1 << 20
STAGE = 32 << 20


class CudaMemory(PinnedMemory):
    typed = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stages: list[Stage] = []
        self._turn = 0

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        return list(allocate(kv, blocks, self.device))

    def upload(self, host: Tensor) -> Tensor:
        staged = host.device != self.device and host.nbytes >= STAGED_FROM and host.is_contiguous()
        return self._staged(host) if staged else super().upload(host)

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
