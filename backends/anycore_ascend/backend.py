"""One NPU, open: memory and operations at hand, decode steps captured as ACL graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from anycore.contract.backend import Backend, Limits, StepFn, StepOutput, WholeStep
from anycore.contract.batch import Batch
from anycore.contract.capture import NotCaptured, Replay
from anycore.contract.graphs import GraphStep
from anycore.errors import PluginError
from anycore_ascend.costs import GRAPH_SIZES
from anycore_ascend.memory import AscendMemory
from anycore_ascend.ops import AscendOps

SET_ENV = "/usr/local/Ascend/ascend-toolkit/set_env.sh (for libatb.so: nnal/atb/set_env.sh)"


class AscendBackend(Backend):
    name = "ascend"
    collective = "hccl"
    overlap = True
    self_check = True

    def __init__(self, index: int = 0) -> None:
        npu = load_torch_npu()
        count = npu.device_count()
        if not 0 <= index < count:
            raise PluginError(f"the ascend backend sees {count} devices, there is no device {index}", param="device")
        device = torch.device("npu", index)
        npu.set_device(device)
        memory = AscendMemory(device)
        ops = AscendOps(memory)
        super().__init__(device, memory, ops)
        self.npu, self.fallbacks = npu, ops.fallbacks
        self._pool: Any = None
        self._replayed = npu.Event()

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        if limits.block_size == 0:  # nothing decodes
            return step
        sizes = [size for size in GRAPH_SIZES if size <= limits.block_size]
        return GraphStep(step, self.ops, limits, self.device, self._capture, sizes, compiles=False, memory=self.memory)

    def synchronize(self) -> None:
        self.npu.synchronize(self.device)

    def _capture(self, work: Callable[[], StepOutput]) -> tuple[Replay, StepOutput]:
        """Record into memory that all graphs share. Lengths are parameters of recorded tasks: replays renew them."""
        self._check_capture(work)
        self._pool = self._pool or self.npu.graph_pool_handle()
        graph = self.npu.NPUGraph()
        stream = self.npu.current_stream(self.device)
        try:
            with self.npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):
                output = work()
        except RuntimeError as error:
            self._leave(graph, stream)
            raise NotCaptured(str(error).splitlines()[0]) from error
        count = len(output.rows)
        ends = list(range(1, count + 1))

        def replay(batch: Batch) -> None:
            lens = batch.seq_lens + [1] * (count - len(batch.query_lens))
            self._replayed.synchronize()  # new lengths must not reach tasks that have not run yet
            graph.update(cpu_update_input=[{"actual_seq_lengths": ends, "actual_seq_lengths_kv": lens}])
            graph.replay()
            self._replayed.record()

        return replay, output

    def _leave(self, graph: Any, stream: Any) -> None:
        """Where a capture does not begin or end, torch_npu leaves its stream and its recording of calls in place."""
        own, recording = graph.graph_dispatch_mode, _get_current_dispatch_mode()
        if recording is not None and own is recording:
            recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.npu.set_stream(stream)

    def _check_capture(self, work: Callable[[], StepOutput]) -> None:
        before = dict(self.fallbacks)
        work()
        slow = [name for name, count in self.fallbacks.items() if count != before.get(name)]
        if slow:  # what computes them reads lengths on the host, which a replay would not renew
            raise NotCaptured(f"{', '.join(slow)} cannot be captured")
        for name, forbidden in (("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")):
            if os.environ.get(name) == forbidden:
                raise NotCaptured(f"{name}={forbidden} forbids it")


def load_torch_npu() -> Any:
    """Import torch_npu and return torch.npu, or raise a PluginError with its own words and what to do."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        advice = f"source {SET_ENV}" if ".so" in words else "install torch and torch_npu of the same release"
        raise PluginError(f"torch_npu does not load: {words}: {advice}", param="backend") from error
    return torch.get_device_module("npu")
