"""One GPU, open: memory and operations at hand, decode steps captured as CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from anycore.contract.backend import Backend, Limits, StepFn, StepOutput, WholeStep
from anycore.contract.capture import Replay
from anycore.contract.graphs import GraphStep
from anycore.errors import PluginError
from anycore_cuda.collective import CardGroup
from anycore_cuda.kernels.launch import launch
from anycore_cuda.memory import CudaMemory
from anycore_cuda.ops import CudaOps

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class CudaBackend(Backend):
    name = "cuda"
    collective: str = "nccl"
    overlap = True
    self_check = False  # it would compile kernels for its own small shapes, which has not been timed on a device yet

    def __init__(self, index: int = 0, early: bool = True) -> None:
        """`early`: kernels may start before the one ahead has ended, on chips that can (kernels/early.py)."""
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, which `probe` lists devices in
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise PluginError(f"the cuda backend sees {count} devices, there is no device {index}", param="device")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        memory = CudaMemory(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        early = early and torch.cuda.get_device_capability(device) >= (9, 0)
        super().__init__(device, memory, CudaOps(memory, processors, early))
        self._pool: Any = None  # a handle of torch's
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def join(self, store: Store, rank: int, size: int, one_host: bool) -> None:
        self.ops.group = CardGroup(self.collective, self.device, store, rank, size, one_host, self._forget)

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        if limits.block_size == 0:  # nothing decodes
            return step
        return GraphStep(
            step, self.ops, limits, self.device, self._capture, rehearsal=self._compiling, memory=self.memory
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _compiling(self) -> AbstractContextManager[None]:
        return launch.compiling(self.device)

    def _capture(self, work: Callable[[], StepOutput]) -> tuple[Replay, StepOutput]:
        """Record into memory that all graphs of this backend share: only one of them runs at a time."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask the driver for events meanwhile, which must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._graphs.append(graph)
        return lambda batch: graph.replay(), output

    def _forget(self) -> None:
        """Drop all graphs; nothing may be replayed from here on."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
