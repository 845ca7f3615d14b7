"""Capturing decode steps once and replaying them: the part that is the same on every device that has graphs.

A step is captured per bucket of batch sizes, on buffers that stay where they are. Replaying one is: copy the batch
into the buffers, one launch, copy the ids out. Steps whose sampling is more than a temperature are captured up to the
hidden rows; what follows, a few launches, runs as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from anycore.contract.backend import StepOutput, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.costs import buckets
from anycore.contract.ops import Ops
from anycore.contract.sizes import Limits

Replay = Callable[[Batch], None]
"""Runs what was captured. The batch, whose rows are in the buffers already, is for devices whose kernels take lengths
from the host: they renew them first.
"""

log = logging.getLogger(__name__)


class NotCaptured(Exception):
    """Raised by a `Capture` that cannot record a step; says why. Such steps then run as they are."""


class Capture(Protocol):
    """The device's part: record what `work` launches, without running it, and return what runs it again.

    `work` has run before, so that nothing is compiled or allocated for the first time while recording.
    """

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[Replay, StepOutput]: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """One captured bucket: how to run it, and where it leaves its rows and perhaps samples."""

    replay: Replay
    rows: Tensor
    samples: Samples | None


class GraphStep:
    """A step function that replays what decodes one token of each request, and passes everything else on."""

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
    ) -> None:
        """`sizes` are the batch sizes to capture, larger batches are not; `compiles` says that kernels are compiled
        when they are first used, so that the warm-up should use them all. Inside `rehearsal` kernels are compiled side
        by side, rather than run, and steps have no effect.
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
        blocks = -(-limits.max_model_len // limits.block_size)
        ids, positions, slots = torch.zeros(3, most, dtype=torch.int64, device=device)
        self._longs = ids, positions, slots
        self._tables = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._lens = torch.ones(most, dtype=torch.int32, device=device)
        self._scratch = torch.arange(most, device=device) % limits.block_size  # slots of rows that belong to nobody
        self._every = torch.arange(most, dtype=torch.int32, device=device)
        self._order = self._every.clone()
        self._order_now: Tensor | None = None  # whose copy it holds
        self._shared = torch.zeros(1, dtype=torch.int32, device=device)
        self._shared_now = 0  # what it holds
        self._temperature = torch.ones(most, dtype=torch.float32, device=device)
        self._uniforms = torch.zeros(most, dtype=ops.draw_dtype, device=device)

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        if sampling is None:  # nothing decodes
            return self.step(batch, sampling)
        if self._rehearsal is not None:
            self._rehearse(self._rehearsal, batch, sampling)
            self._rehearsal = None
        if not replayable(batch):
            return self.step(batch, sampling)
        count = len(batch.query_lens)
        if count > self.buckets[-1]:
            return self.step(batch, sampling)
        bucket = next(size for size in self.buckets if size >= count)
        whole, shares = is_plain(sampling), self.ops.shares(batch)
        if (bucket, whole, shares) not in self._recorded:
            self._prepare(batch, bucket, whole, shares)
        recorded = self._recorded[bucket, whole, shares]
        if recorded is None:
            return self.step(batch, sampling)
        self._fill(batch, count, bucket)
        if whole:
            self._temperature[:count].copy_(sampling.temperature)
            self._uniforms[:count].copy_(sampling.uniforms)
        if shares and batch.shared_tokens != self._shared_now:
            self._shared_now = batch.shared_tokens
            self._shared.fill_(self._shared_now)
        recorded.replay(batch)
        rows = recorded.rows[:count]
        if recorded.samples is None:
            return StepOutput(rows, self.step.sample(rows, sampling))
        # The next replay overwrites its samples, perhaps before the host has read them.
        ids, finite = recorded.samples.ids[:count].clone(), recorded.samples.finite[:count].clone()
        return StepOutput(rows, Samples(ids, finite))

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
        """Capture what is missing: at first every bucket with plain sampling, later the one at hand.

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
        if not whole:
            self._record(batch, bucket, whole, shares)

    def _record(self, batch: Batch, bucket: int, whole: bool, shares: bool) -> None:
        mine, sampling = self._batch(batch, bucket, shares), self._sampling_of(bucket) if whole else None

        def work() -> StepOutput:
            return self.step(mine, sampling)

        self._reset(0, bucket)
        self._sort(None, 0, bucket)
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
        zeros = torch.zeros(rows, dtype=torch.int64, device=self._tables.device)
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
        ids, positions, slots = (x[:count] for x in self._longs)
        batch = replace(
            like,
            input_ids=ids,
            positions=positions,
            slots=slots,
            query_lens=[1] * count,
            context_lens=[0] * count,
            output_rows=None,
            block_tables=self._tables[:count],
            token_types=None,
            order=self._order[:count],
            shared_tokens=self._tables.shape[1] * like.block_size if shares else 0,
        )
        batch.seq_lens_device, batch.shared_tokens_device = self._lens[:count], self._shared
        batch.plan = self.ops.plan(batch)
        return batch

    def _sampling_of(self, count: int) -> Sampling:
        return Sampling(self._temperature[:count], self._uniforms[:count])

    def _reset(self, first: int, last: int) -> None:
        """Let rows belong to nobody: they store into the scratch block and see one token of it."""
        self._longs[2][first:last].copy_(self._scratch[: last - first])
        self._lens[first:last].fill_(1)

    def _sort(self, order: Tensor | None, count: int, bucket: int) -> None:
        """Hold another batch's order, followed by the rows that belong to nobody."""
        self._order_now = order
        if order is not None:
            self._order[:count].copy_(order)
        self._order[count:bucket].copy_(self._every[count:bucket])

    def _fill(self, batch: Batch, count: int, bucket: int) -> None:
        assert batch.slots is not None
        assert batch.block_tables is not None
        places = [place[:count] for place in self._longs]
        torch._foreach_copy_(places, [batch.input_ids, batch.positions, batch.slots])
        self._lens[:count].copy_(batch.seq_lens_device)
        self._tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if count < bucket:
            self._reset(count, bucket)
        if batch.order is None:
            self._sort(None, 0, bucket)
        elif batch.order is not self._order_now:
            self._sort(batch.order, count, bucket)


def replayable(batch: Batch) -> bool:
    """Whether a step has the one shape that is captured."""
    return batch.output_rows is None and batch.decode_only


def is_plain(sampling: Sampling) -> bool:
    """Whether there is nothing to sampling but temperatures and draws."""
    return not sampling.filtered and not sampling.edited and sampling.logprobs is None
