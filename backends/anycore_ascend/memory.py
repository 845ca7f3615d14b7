"""One NPU's memory: what is free, a cache in the layout its operators read, transfers through pinned buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Download, KVSpec, Memory, Peak

ALIGNMENT = 64  # bytes


class AscendMemory(Memory):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.npu: Any = torch.npu  # type: ignore[attr-defined]  # torch_npu adds it; its names are those of torch.cuda

    def total(self) -> int:
        return int(self.npu.mem_get_info(self.device)[1])

    def free(self) -> int:
        """What the driver has free, and what torch_npu's allocator holds without using it."""
        cached = self.npu.memory_reserved(self.device) - self.npu.memory_allocated(self.device)
        return int(self.npu.mem_get_info(self.device)[0] + cached)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak = Peak()
        self.npu.reset_peak_memory_stats(self.device)
        start = self.npu.memory_allocated(self.device)
        yield peak
        peak.bytes = max(0, self.npu.max_memory_allocated(self.device) - start)

    def block_bytes(self, kv: KVSpec) -> int:
        wide = replace(kv, head_dim=padded(kv.head_dim))
        return wide.bytes_per_token * kv.block_size

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        """A tensor [2, blocks, block_size, Hkv, D] a layer; D is 64, 128 or more, the rest of it stays 0."""
        shape = (2, blocks, kv.block_size, kv.kv_heads, padded(kv.head_dim))
        dtype = getattr(torch, kv.dtype)
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(kv.layers)]

    def upload(self, host: Tensor) -> Tensor:
        if host.device == self.device:
            return host
        # The allocator of pinned memory gives a block out again only after the copy from it has run.
        return host.pin_memory().to(self.device, non_blocking=True)

    def upload_all(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """One transfer a data type. Bytes are not sent as one type and read as another, as torch_npu keeps notes of
        a storage's type beside it.
        """
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
        arrived = self.npu.Event()
        arrived.record(self.npu.current_stream(self.device))

        def wait() -> list[Tensor]:
            arrived.synchronize()
            return hosts

        return wait


def padded(head_dim: int) -> int:
    """The head size of the cache: what the attention operator takes, 64 or 128, else the model's own."""
    return next((size for size in (64, 128) if head_dim <= size), head_dim)
