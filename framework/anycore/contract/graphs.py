"""Capturing decode steps once and replaying them: the part that is the same on every device that has graphs.

A step is captured per bucket of batch sizes, on buffers that stay where they are. Replaying one is: copy the batch
into the buffers, one launch, copy the ids out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from anycore.contract.backend import StepFn, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.ops import Ops
from anycore.contract.sizes import Limits

Replay = Callable[[], None]


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

    def __init__(self, step: StepFn, ops: Ops, limits: Limits, device: torch.device, capture: Capture) -> None:
        self.step = step
        self.ops = ops
        self.capture = capture
        self.buckets = buckets(limits.max_num_seqs)
        self._recorded: dict[tuple[int, bool], Recorded] = {}
        most = limits.max_num_seqs
        blocks = -(-limits.max_model_len // limits.block_size)
        ids, positions, slots, top_k = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._longs = ids, positions, slots
        self._tables = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._lens = torch.ones(most, dtype=torch.int32, device=device)
        temperature, top_p, min_p = torch.ones(3, most, dtype=torch.float32, device=device)
        uniforms = torch.zeros(most, dtype=torch.float64, device=device)
        self._sampling = Sampling(temperature, uniforms, top_k, top_p, min_p)

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        if sampling is None or not replayable(batch, sampling):
            return self.step(batch, sampling)
        count = len(batch.query_lens)
        bucket = next(size for size in self.buckets if size >= count)
        filtered = not (sampling.all_greedy or sampling.top_k is sampling.top_p is sampling.min_p is None)
        if (bucket, filtered) not in self._recorded:
            self._prepare(batch, bucket, filtered)
        self._fill(batch, sampling, count, bucket, filtered)
        recorded = self._recorded[bucket, filtered]
        recorded.replay()
        # The next replay overwrites its samples, perhaps before the host has read them.
        ids, finite = recorded.samples.ids[:count].clone(), recorded.samples.finite[:count].clone()
        return StepOutput(recorded.rows[:count], Samples(ids, finite))

    def _prepare(self, batch: Batch, bucket: int, filtered: bool) -> None:
        """Capture what is missing: at first every bucket, later the one at hand.

        The first time, which is the warm-up, the other kinds of steps are run once, too: nothing is compiled later.
        """
        if self._recorded:
            self._record(batch, bucket, filtered)
            return
        for decoding in (1, self.buckets[-1] - 1):
            self.step(self._mixed(batch, decoding), self._sampling_of(decoding + 1, filtered=True))
        for size in reversed(self.buckets):  # the largest first: later ones then fit into the memory it took
            self._record(batch, size, filtered)

    def _record(self, batch: Batch, bucket: int, filtered: bool) -> None:
        mine, sampling = self._batch(batch, bucket), self._sampling_of(bucket, filtered)

        def work() -> StepOutput:
            return self.step(mine, sampling)

        self._reset(0, bucket)
        work()
        replay, output = self.capture(work)
        assert output.samples is not None
        self._recorded[bucket, filtered] = Recorded(replay, output.rows, output.samples)

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

    def _batch(self, like: Batch, count: int) -> Batch:
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
        )
        batch.seq_lens_device = self._lens[:count]
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
        self._longs[2][first:last].zero_()
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
