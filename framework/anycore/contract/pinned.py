"""Memory of a device that torch drives: its own module counts bytes, transfers go through pinned buffers.

`torch.get_device_module` names the module; its functions are called alike on every such device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Download, Memory, Peak

ALIGNMENT = 64  # bytes


class PinnedMemory(Memory):
    """A base for backends: what is left to them is the layout of the cache, and what their device does better."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)

    def total(self) -> int:
        return int(self.module.mem_get_info(self.device)[1])

    def free(self) -> int:
        """What the driver has free, and what torch's allocator holds without using it."""
        cached = self.module.memory_reserved(self.device) - self.module.memory_allocated(self.device)
        return int(self.module.mem_get_info(self.device)[0] + cached)

    def held(self) -> int:
        return int(self.module.memory_allocated(self.device))

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak = Peak()
        self.module.reset_peak_memory_stats(self.device)
        start = self.module.memory_allocated(self.device)
        yield peak
        peak.bytes = max(0, self.module.max_memory_allocated(self.device) - start)

    def upload(self, host: Tensor) -> Tensor:
        if host.device == self.device:
            return host
        # The allocator of pinned memory gives a block out again only after the copy from it has run.
        return host.pin_memory().to(self.device, non_blocking=True)

    def upload_all(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """One transfer a data type. Not one for all: some devices note a storage's type and refuse to read another."""
        there: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(host.dtype for host in hosts):
            group = [i for i, host in enumerate(hosts) if host.dtype == dtype]
            step = ALIGNMENT // hosts[group[0]].element_size()
            starts = [0]
            for i in group:
                starts.append(-(-(starts[-1] + hosts[i].numel()) // step) * step)
            buffer = torch.empty(starts[-1], dtype=dtype, pin_memory=True)
            for i, start in zip(group, starts, strict=False):
                buffer[start : start + hosts[i].numel()] = hosts[i].reshape(-1)
            sent = buffer.to(self.device, non_blocking=True)
            for i, start in zip(group, starts, strict=False):
                there[i] = sent[start : start + hosts[i].numel()].view(hosts[i].shape)
        return [there[i] for i in range(len(hosts))]

    def download(self, tensors: Sequence[Tensor]) -> Download:
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        arrived = self.module.Event()
        arrived.record(self.module.current_stream(self.device))

        def wait() -> list[Tensor]:
            arrived.synchronize()
            return hosts

        return wait
