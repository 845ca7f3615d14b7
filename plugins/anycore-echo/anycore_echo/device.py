"""The echo device, open. It computes on the host with the default operations, unless the script says otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from anycore.contract.backend import Backend, Limits, Memory, StepFn, StepOutput
from anycore.contract.batch import Batch, Sampling
from anycore.contract.ops import Ops
from anycore.errors import PluginError
from anycore_echo import Script


class EchoMemory(Memory):
    """As much memory as the script says; what is allocated is not subtracted."""

    def __init__(self, script: Script) -> None:
        super().__init__(torch.device("cpu"))
        self.script = script

    def total(self) -> int:
        return self.script.memory_total

    def free(self) -> int:
        return self.script.memory_free


class Echo(Backend):
    def __init__(self, script: Script, index: int) -> None:
        if not 0 <= index < script.devices:
            raise PluginError(f"the {script.name} backend has {script.devices} devices, and no {index}", param="device")
        if script.failure == "open":
            raise RuntimeError(f"echo: device {index} does not answer")
        self.name = script.name
        self.script = script
        super().__init__(torch.device("cpu"), EchoMemory(script), Ops())
        for operation in script.lacks:
            setattr(self.ops, operation, partial(_no_kernel, operation, script.chip))
        for operation in script.emulates:
            setattr(self.ops, operation, partial(self._emulate, operation, getattr(self.ops, operation)))

    def optimize(self, step: StepFn, limits: Limits) -> StepFn:
        """Wrap the step, as a backend with captured graphs does; here to lose the device, or to repeat the input."""
        count = 0

        def scripted(batch: Batch, sampling: Sampling | None) -> StepOutput:
            nonlocal count
            count += 1
            if count == self.script.fail_at_step:
                raise RuntimeError(f"echo: device lost in step {count}")
            output = step(batch, sampling)
            if count == self.script.nan_at_step:
                output.rows = torch.full_like(output.rows, float("nan"))
                if output.samples is not None:
                    output.samples.finite.fill_(False)
            if self.script.repeat and output.samples is not None:
                ids = output.samples.ids
                ids.copy_(batch.wanted(batch.input_ids)[: len(ids)])
            return output

        return scripted

    def _emulate(self, operation: str, default: Any, *arguments: Any, **options: Any) -> Any:
        """Compute an operation the device lacks in another way, and count it: the engine reports `fallbacks`."""
        self.fallbacks[operation] = self.fallbacks.get(operation, 0) + 1
        return default(*arguments, **options)


def _no_kernel(operation: str, chip: str, *arguments: Any, **options: Any) -> Any:
    raise NotImplementedError(f"echo: there is no {operation} kernel for chip {chip}")
