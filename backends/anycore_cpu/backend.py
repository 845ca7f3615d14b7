"""The CPU backend, open: threads set, memory and operations at hand."""

from __future__ import annotations

import torch

from anycore.contract.backend import Backend
from anycore.errors import PluginError
from anycore_cpu.memory import CpuMemory
from anycore_cpu.ops import CpuOps
from anycore_cpu.probe import usable_cores


class CpuBackend(Backend):
    name = "cpu"
    collective = "gloo"

    def __init__(self, index: int = 0) -> None:
        if index != 0:
            raise PluginError(f"the cpu backend has one device, 0, not {index}", param="device")
        # torch knows OMP_NUM_THREADS and the affinity mask, but not a container's quota.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        super().__init__(torch.device("cpu"), CpuMemory(), CpuOps())
