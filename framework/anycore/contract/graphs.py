"""Capturing decode steps once and replaying them: the part that is the same on every device that has graphs.

A step is captured per bucket of batch sizes, on buffers that stay where they are. Replaying one is: copy the batch
into the buffers, one launch, copy the ids out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from anycore.contract.backend import StepFn, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
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


def buckets(most: int) -> list[int]:
    """Batch sizes to capture: close together where a step is short, never more than an eighth too large from 64 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One captured bucket: how to run it, and where it leaves its samples."""

    replay: Replay
    rows: Tensor
    samples: Samples


class GraphStep:
    """A step function that replays captured decode steps and passes everything else on.

    Replayed is what decodes one token of each request and samples with temperature, top-k, top-p and min-p alone.
    """

    def __init__(
        self,
        step: StepFn,
        ops: Ops,
        limits: Limits,
        device: torch.device,
        capture: Capture,
        sizes: Sequence[int] | None = None,
        compiles: bool = True,
    ) -> None:
        """`sizes` are the batch sizes to capture, larger batches are not; `compiles` says that kernels are compiled
        when they are first used, so that the warm-up should use them all.
        """
        self.step = step
        self.ops = ops
        self.capture = capture
        self.compiles = compiles
        most = limits.max_num_seqs
        self.buckets = buckets(most) if sizes is None else sorted({min(size, most) for size in sizes})
        self._recorded: dict[tuple[int, bool, bool], Recorded | None] = {}
        self._said: set[str] = set()  # reasons why steps were not captured
        blocks = -(-limits.max_model_len // limits.block_size)
        ids, positions, slots, top_k = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._longs = ids, positions, slots
        self._tables = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._lens = torch.ones(most, dtype=torch.int32, device=device)
        self._scratch = torch.arange(most, device=device) % limits.block_size  # slots of rows that belong to nobody
        self._shared = torch.zeros(1, dtype=torch.int32, device=device)
        self._shared_now = 0  # what it holds
        temperature, top_p, min_p = torch.ones(3, most, dtype=torch.float32, device=device)
        uniforms = torch.zeros(most, dtype=ops.draw_dtype, device=device)
        self._sampling = Sampling(temperature, uniforms, top_k, top_p, min_p)

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        if sampling is None or not replayable(batch, sampling):
            return self.step(batch, sampling)
        count = len(batch.query_lens)
        if count > self.buckets[-1]:
            return self.step(batch, sampling)
        bucket = next(size for size in self.buckets if size >= count)
        filtered = not (sampling.all_greedy or sampling.top_k is sampling.top_p is sampling.min_p is None)
        shares = self.ops.shares(batch)
        if (bucket, filtered, shares) not in self._recorded:
            self._prepare(batch, bucket, filtered, shares)
        recorded = self._recorded[bucket, filtered, shares]
        if recorded is None:
            return self.step(batch, sampling)
        self._fill(batch, sampling, count, bucket, filtered)
        if shares and batch.shared_tokens != self._shared_now:
            self._shared_now = batch.shared_tokens
            self._shared.fill_(self._shared_now)
        recorded.replay(batch)
        # The next replay overwrites its samples, perhaps before the host has read them.
        ids, finite = recorded.samples.ids[:count].clone(), recorded.samples.finite[:count].clone()
        return StepOutput(recorded.rows[:count], Samples(ids, finite))

    def _prepare(self, batch: Batch, bucket: int, filtered: bool, shares: bool) -> None:
        """Capture what is missing: at first every bucket, later the one at hand.

        The first time, which is the warm-up, the other kinds of steps are run once, too: nothing is compiled later.
        """
        if self._recorded:
            self._record(batch, bucket, filtered, shares)
            return
        for decoding in (1, self.buckets[-1] - 1) if self.compiles else ():
            self.step(self._mixed(batch, decoding), self._sampling_of(decoding + 1, filtered=True))
        sharing = self._batch(batch, self.buckets[-1], shares=True)
        if self.compiles and self.ops.shares(sharing):
            self.step(sharing, self._sampling_of(self.buckets[-1], filtered))
        for size in reversed(self.buckets):  # the largest first: later ones then fit into the memory it took
            self._record(batch, size, filtered, shares)

    def _record(self, batch: Batch, bucket: int, filtered: bool, shares: bool) -> None:
        mine, sampling = self._batch(batch, bucket, shares), self._sampling_of(bucket, filtered)

        def work() -> StepOutput:
            return self.step(mine, sampling)

        self._reset(0, bucket)
        work()
        try:
            replay, output = self.capture(work)
        except NotCaptured as error:
            if str(error) not in self._said:
                log.warning("decode steps of %d requests are not captured and take longer to launch: %s", bucket, error)
            self._said.add(str(error))
            self._recorded[bucket, filtered, shares] = None
            return
        assert output.samples is not None
        self._recorded[bucket, filtered, shares] = Recorded(replay, output.rows, output.samples)

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
            shared_tokens=self._tables.shape[1] * like.block_size if shares else 0,
        )
        batch.seq_lens_device, batch.shared_tokens_device = self._lens[:count], self._shared
        batch.plan = self.ops.plan(batch)
        return batch

    def _sampling_of(self, count: int, filtered: bool) -> Sampling:
        own = self._sampling
        if not filtered:
            return Sampling(own.temperature[:count], own.uniforms[:count])
        assert own.top_k is not None
        assert own.top_p is not None
        assert own.min_p is not None
        filters = own.top_k[:count], own.top_p[:count], own.min_p[:count]
        return Sampling(own.temperature[:count], own.uniforms[:count], *filters)

    def _reset(self, first: int, last: int) -> None:
        """Let rows belong to nobody: they store into the scratch block and see one token of it."""
        self._longs[2][first:last].copy_(self._scratch[: last - first])
        self._lens[first:last].fill_(1)

    def _fill(self, batch: Batch, sampling: Sampling, count: int, bucket: int, filtered: bool) -> None:
        assert batch.slots is not None
        assert batch.block_tables is not None
        own = self._sampling
        longs = [(self._longs[0], batch.input_ids), (self._longs[1], batch.positions), (self._longs[2], batch.slots)]
        floats = [(own.temperature, sampling.temperature)]
        if filtered:
            offs: list[tuple[Tensor | None, Tensor | None, float]] = [
                (own.top_k, sampling.top_k, 1 << 30),
                (own.top_p, sampling.top_p, 1.0),
                (own.min_p, sampling.min_p, 0.0),
            ]
            for mine, theirs, off in offs:
                assert mine is not None
                if theirs is None:
                    mine[:count].fill_(off)
                else:
                    (longs if theirs.dtype == torch.int64 else floats).append((mine, theirs))
        for pairs in (longs, floats):
            torch._foreach_copy_([to[:count] for to, _ in pairs], [source for _, source in pairs])
        own.uniforms[:count].copy_(sampling.uniforms)
        self._lens[:count].copy_(batch.seq_lens_device)
        self._tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        if count < bucket:
            self._reset(count, bucket)


def replayable(batch: Batch, sampling: Sampling) -> bool:
    """Whether a step has the one shape that is captured."""
    plain = sampling.penalties is None and sampling.bias is None and sampling.banned is None
    return plain and sampling.logprobs is None and batch.output_rows is None and batch.decode_only
