"""Capturing decode steps once and replaying them: the part that is the same on every device that has graphs.

A step is captured per bucket of batch sizes, on a desk. Replaying one that was laid there is one launch. Steps whose
sampling is more than a temperature are captured up to the hidden rows; what follows, a few launches, runs as it is.
Steps with prompts are captured the same way where that pays (`contract.mixed`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anycore.contract.backend import Memory, StepOutput, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.capture import Capture, NotCaptured, Replay
from anycore.contract.costs import buckets
from anycore.contract.desk import Desk
from anycore.contract.mixed import MixedSteps
from anycore.contract.ops import Ops
from anycore.contract.sizes import Limits

FEW = 8
"""Batches up to so many requests are captured with and without sampling in the warm-up: at low load each capture that
was put off would hold a request up.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One captured bucket: how to run it, and where it leaves its rows and perhaps samples."""

    replay: Replay
    rows: Tensor
    samples: Samples | None
    outputs: dict[int, StepOutput] = field(default_factory=dict)  # for so many requests

    def output(self, count: int) -> StepOutput:
        """What the first rows left. It lasts until the next replay."""
        if count not in self.outputs:
            samples = self.samples
            if samples is not None:
                samples = Samples(samples.ids[:count], samples.finite[:count], together=samples.together)
            self.outputs[count] = StepOutput(self.rows[:count], samples)
        return self.outputs[count]


class GraphStep:
    """A step function that replays what decodes one token of each request, short prompts beside it, and passes
    everything else on.
    """

    def __init__(
        self,
        step: WholeStep,
        ops: Ops,
        limits: Limits,
        device: torch.device,
        capture: Capture,
        sizes: Sequence[int] | None = None,
        compiles: bool = True,
        rehearsal: Callable[[], AbstractContextManager[None]] | None = None,
        memory: Memory | None = None,
    ) -> None:
        """`sizes` are the batch sizes to capture, larger batches are not; `compiles` says that kernels are compiled
        when they are first used, so that the warm-up should use them all. Inside `rehearsal` kernels are compiled side
        by side, rather than run, and steps have no effect. `memory` is the device's, by default a plain one.
        """
        self.step = step
        self.ops = ops
        self.capture = capture
        self.compiles = compiles
        self._rehearsal = rehearsal  # None once it is over
        most = limits.max_num_seqs
        self.buckets = buckets(most) if sizes is None else sorted({min(size, most) for size in sizes})
        self._recorded: dict[tuple[int, bool, bool], Recorded | None] = {}
        self._said: set[str] = set()  # reasons why steps were not captured
        self.desk = Desk(memory or Memory(device), limits, ops.draw_dtype)
        self.mixed = MixedSteps(step, ops, limits, device, capture)
        self._shared = torch.zeros(1, dtype=torch.int32, device=device)
        self._shared_now = 0  # what it holds

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        if sampling is None:  # nothing decodes
            return self.step(batch, sampling)
        if self._rehearsal is not None:
            self._rehearse(self._rehearsal, batch, sampling)
            self._rehearsal = None
        if not replayable(batch):
            rows = self.mixed(batch)
            if rows is None:
                return self.step(batch, sampling)
            return StepOutput(rows, self.step.sample(rows[: len(sampling.temperature)], sampling))
        count = len(batch.query_lens)
        if count > self.buckets[-1]:
            return self.step(batch, sampling)
        bucket = next(size for size in self.buckets if size >= count)
        whole, shares = is_plain(sampling), self.ops.shares(batch)
        if (bucket, whole, shares) not in self._recorded:
            with self.desk.cleared():
                self._prepare(batch, bucket, whole, shares)
        recorded = self._recorded[bucket, whole, shares]
        if recorded is None:
            return self.step(batch, sampling)
        batch.padding = bucket - count
        self._fill(batch, sampling if whole else None)
        if shares and batch.shared_tokens != self._shared_now:
            self._shared_now = batch.shared_tokens
            self._shared.fill_(self._shared_now)
        recorded.replay(batch)
        output = recorded.output(count)
        return output if whole else StepOutput(output.rows, self.step.sample(output.rows, sampling))

    def use_pause(self) -> bool:
        """Do what a later step would have to wait for, while nobody waits; return whether there was anything."""
        return self.mixed.use_pause()

    def _rehearse(
        self, rehearsal: Callable[[], AbstractContextManager[None]], batch: Batch, sampling: Sampling
    ) -> None:
        """Go through the first step and all kinds that `_prepare` runs, for the kernels that they will ask for."""
        most = self.buckets[-1]
        with rehearsal():
            self.step(batch, replace(sampling, logprobs=None))  # they are looked up by ids that nobody has drawn here
            for decoding in (1, most - 1):
                self.step(self._mixed(batch, decoding), self._sampling_of(decoding + 1))
            self.step(self._batch(batch, most, shares=True), self._sampling_of(most))
            for size in self.buckets:
                if size & size - 1 == 0 or size == most:  # kernels that differ by size do so at powers of 2
                    self.step(self._batch(batch, size, shares=False), self._sampling_of(size))

    def _prepare(self, batch: Batch, bucket: int, whole: bool, shares: bool) -> None:
        """Capture what is missing: at first every bucket with plain sampling, and small ones without any, later the one
        at hand. The desk is clear.

        The first time, which is the warm-up, the other kinds of steps are run once, too: nothing is compiled later.
        """
        if self._recorded:
            self._record(batch, bucket, whole, shares)
            return
        for decoding in (1, self.buckets[-1] - 1) if self.compiles else ():
            self.step(self._mixed(batch, decoding), self._sampling_of(decoding + 1))
        sharing = self._batch(batch, self.buckets[-1], shares=True)
        if self.compiles and self.ops.shares(sharing):
            self.step(sharing, self._sampling_of(self.buckets[-1]))
        for size in reversed(self.buckets):  # the largest first: later ones then fit into the memory it took
            self._record(batch, size, True, shares)
            if size <= FEW and self.compiles:
                self._record(batch, size, False, shares)
        if (bucket, whole, shares) not in self._recorded:
            self._record(batch, bucket, whole, shares)
        if self.compiles:
            self.mixed.warm_up(self._mixed(batch, 1))

    def _record(self, batch: Batch, bucket: int, whole: bool, shares: bool) -> None:
        mine, sampling = self._batch(batch, bucket, shares), self._sampling_of(bucket) if whole else None

        def work() -> StepOutput:
            output = self.step(mine, sampling)
            if output.samples is not None and output.samples.together is None:
                ids, finite = output.samples.ids, output.samples.finite
                output.samples.together = torch.stack((ids, finite.to(ids.dtype)))
            return output

        if whole or (bucket, True, shares) not in self._recorded:  # which has run all that this one is made of
            work()
        try:
            replay, output = self.capture(work)
        except NotCaptured as error:
            if str(error) not in self._said:
                log.warning("decode steps of %d requests are not captured and take longer to launch: %s", bucket, error)
            self._said.add(str(error))
            self._recorded[bucket, whole, shares] = None
            return
        self._recorded[bucket, whole, shares] = Recorded(replay, output.rows, output.samples)

    def _mixed(self, like: Batch, decoding: int) -> Batch:
        """Requests that decode beside one in the middle of its prompt, all within the scratch block."""
        size = like.block_size
        lens = [1] * decoding + [size + 1]
        rows = decoding + size + 1
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.desk.tables.device)
        batch = replace(
            like,
            input_ids=zeros,
            positions=zeros,
            slots=zeros,
            query_lens=lens,
            context_lens=[size] * len(lens),
            output_rows=zeros[: len(lens)],
            block_tables=torch.zeros(len(lens), 3, dtype=torch.int32, device=zeros.device),
            token_types=None,
        )
        batch.plan = self.ops.plan(batch)
        return batch

    def _batch(self, like: Batch, count: int, shares: bool) -> Batch:
        """The first `count` places of the buffers as a batch. Its host lengths mean nothing to a captured kernel."""
        view = self.desk.view
        batch = replace(
            like,
            input_ids=view("ids", count),
            positions=view("positions", count),
            slots=view("slots", count),
            query_lens=[1] * count,
            context_lens=[0] * count,
            output_rows=None,
            block_tables=view("tables", count),
            token_types=None,
            order=view("order", count),
            shared_tokens=self.desk.tables.shape[1] * like.block_size if shares else 0,
        )
        batch.seq_lens_device, batch.shared_tokens_device = view("lens", count), self._shared
        batch.plan = self.ops.plan(batch)
        return batch

    def _sampling_of(self, count: int) -> Sampling:
        return Sampling(self.desk.view("temperature", count), self.desk.view("uniforms", count))

    def _fill(self, batch: Batch, sampling: Sampling | None) -> None:
        """Copy to the desk what was not laid there."""
        desk, count = self.desk, len(batch.query_lens)
        if batch.positions is not desk.view("positions", count):
            assert batch.block_tables is not None
            desk.clear()
            desk.tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        numbers = {
            "ids": batch.input_ids,
            "positions": batch.positions,
            "slots": batch.slots,
            "lens": batch.seq_lens_device,
            "order": batch.order,
        }
        if sampling is not None:
            numbers |= {"temperature": sampling.temperature, "uniforms": sampling.uniforms}
        for name, theirs in numbers.items():
            mine = desk.view(name, count)
            if theirs is not None and theirs is not mine:
                mine.copy_(theirs)


def replayable(batch: Batch) -> bool:
    """Whether a step has the one shape that is captured."""
    return batch.output_rows is None and batch.decode_only


def is_plain(sampling: Sampling) -> bool:
    """Whether there is nothing to sampling but temperatures and draws."""
    return not sampling.filtered and not sampling.edited and sampling.logprobs is None
