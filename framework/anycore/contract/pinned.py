"""Memory of a device that torch drives: its own module counts bytes, transfers go through pinned buffers.

`torch.get_device_module` names the module; its functions are called alike on every such device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from anycore.contract.backend import Download, Memory, Peak

ALIGNMENT = 64  # bytes

Name = TypeVar("Name")


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
        """One transfer, or one a data type."""
        there: dict[int, Tensor] = {}
        for dtype, members in grouped(dict(enumerate(hosts)), self.typed).items():
            like = [hosts[i] for i in members]
            starts = starts_of(like)
            buffer = torch.empty(starts[-1] // dtype.itemsize, dtype=dtype, pin_memory=True)
            places = buffer.numpy()  # torch takes longer to cut and copy such small pieces
            for host, start in zip(like, starts, strict=False):
                array = host.numpy()
                first = start // array.itemsize
                places.view(array.dtype)[first : first + array.size] = array.reshape(-1)
            there.update(zip(members, cut(buffer.to(self.device, non_blocking=True), starts, like), strict=True))
        return [there[i] for i in range(len(hosts))]

    def renew(self, there: Tensor, here: Tensor) -> None:
        there.copy_(here.pin_memory(), non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
        arrived = self.module.Event()
        arrived.record(self.module.current_stream(self.device))

        def wait() -> list[Tensor]:
            arrived.synchronize()
            return hosts

        return wait


def grouped(tensors: Mapping[Name, Tensor], typed: bool) -> dict[torch.dtype, list[Name]]:
    """Which of some tensors may share a buffer, and its type: any of them where a buffer is bytes."""
    groups: dict[torch.dtype, list[Name]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.dtype if typed else torch.uint8, []).append(name)
    return groups


def starts_of(tensors: Sequence[Tensor]) -> list[int]:
    """The bytes at which each of some tensors begins, side by side in a buffer, and at which the last one ends."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts


def cut(buffer: Tensor, starts: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a buffer, each of the type and shape of a tensor."""
    whole: dict[torch.dtype, Tensor] = {}
    parts = []
    for start, tensor in zip(starts, like, strict=False):
        if tensor.dtype not in whole:
            whole[tensor.dtype] = buffer.view(tensor.dtype)
        first = start // tensor.itemsize
        part = whole[tensor.dtype][first : first + tensor.numel()]
        parts.append(part if tensor.dim() == 1 else part.view(tensor.shape))
    return parts
