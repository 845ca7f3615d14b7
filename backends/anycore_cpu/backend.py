"""The CPU backend, open: threads set, memory and operations at hand."""

from __future__ import annotations

import ctypes

import torch

from anycore.contract.backend import Backend, Limits, StepFn, WholeStep
from anycore.contract.host import usable_cores
from anycore.errors import PluginError
from anycore_cpu.kernel_ops import KernelOps
from anycore_cpu.kernels.library import load_best
from anycore_cpu.memory import CpuMemory
from anycore_cpu.ops import CpuOps
from anycore_cpu.probe import processor_flags
from anycore_cpu.replay import ReplayStep

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers, from glibc's malloc.h


class CpuBackend(Backend):
    name = "cpu"
    collective = "gloo"

    def __init__(self, index: int = 0) -> None:
        if index != 0:
            raise PluginError(f"the cpu backend has one device, 0, not {index}", param="device")
        # torch knows OMP_NUM_THREADS and the affinity mask, but not a container's quota.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        keep_freed_memory()
        self._kernels = kernels = load_best(processor_flags(), torch.get_num_threads())
        ops = CpuOps() if kernels is None else KernelOps(kernels)
        super().__init__(torch.device("cpu"), CpuMemory(kernels is not None), ops)

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        if self._kernels is None or self.ops.group.size > 1:  # what ranks exchange is no kernel, and not recorded
            return step
        if self._kernels.shelf.is_used:
            return_freed_memory()
        return ReplayStep(step, self._kernels, limits)


def keep_freed_memory() -> None:
    """Ask glibc to keep what a step frees for the next step, up to 512 MiB.

    It would hand large tensors back to the system and take them again, zeroed page by page: a tenth of an encoder's
    time. Other C libraries have no such setting and are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the largest value glibc takes
        mallopt(TRIM_THRESHOLD, 512 << 20)


def return_freed_memory() -> None:
    """Give back what loading has freed: packed weights lie elsewhere, and steps need less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
