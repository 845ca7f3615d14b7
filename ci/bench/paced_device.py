"""The device of `paced.py`, open. It overlaps, as accelerators do: results are there when the time of a step, and of
those before it, is over. Waiting takes no processor, so that the rest of the machine has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from anycore.contract.backend import Backend, Download, Limits, Memory, StepFn, StepOutput, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.ops import Ops


def seconds(rows: Sequence[int], contexts: Sequence[int]) -> float:
    """What a step takes: a floor, then by its rows, by what they look back on and, with a prompt in it, a little more.

    Args:
        rows: of each request.
        contexts: tokens before them.
    """
    count, prompts = sum(rows), any(n > 1 for n in rows)
    pairs = sum(n * context + n * (n + 1) // 2 for n, context in zip(rows, contexts, strict=True))
    return 0.02 + 2e-4 * max(0, count - 8) + 1e-7 * pairs + (0.004 if prompts else 0.0)


def launching(rows: Sequence[int]) -> float:
    """What the host takes to launch a step: prompts kernel by kernel, all else at once."""
    return 0.03 if any(n > 1 for n in rows) else 0.0005


class PacedMemory(Memory):
    """The host's memory, and the moment at which all that was launched has been computed."""

    until = 0.0
    size = 0

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size

    def download(self, tensors: Sequence[Tensor]) -> Download:
        until = self.until

        def arrive() -> list[Tensor]:
            time.sleep(max(0.0, until - time.monotonic()))
            return list(tensors)

        return arrive


class Paced(Backend):
    name = "paced"
    overlap = True
    self_check = False

    def __init__(self, slower: float, size: int) -> None:
        self._slower = slower
        self._memory = PacedMemory(torch.device("cpu"))
        self._memory.size = size
        super().__init__(torch.device("cpu"), self._memory, Ops())

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        return self._step

    def _step(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        now = time.monotonic()
        took = self._slower * seconds(batch.query_lens, batch.context_lens)
        host = self._slower * launching(batch.query_lens)
        self._memory.until = max(max(self._memory.until, now) + took, now + host)
        time.sleep(host)
        rows = torch.zeros(1, 1)
        if sampling is None:
            return StepOutput(rows)
        count = len(sampling.temperature)  # ids are of plain letters mostly: each token is an event of its own
        return StepOutput(rows, Samples(torch.randint(10, 80, (count,)), torch.ones(count, dtype=torch.bool)))
