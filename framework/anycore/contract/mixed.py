"""Replaying steps that compute prompts, where launching one takes longer than computing it.

A short prompt of a small model is computed within a millisecond, and launching its few hundred kernels takes eight.
Such steps are captured as well, for so many rows and so many requests, with room for whatever lies within these: rows
that are left over belong to nobody and are stored in the scratch block, and requests that are left over have no rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.capture import Capture, NotCaptured, Replay
from anycore.contract.costs import MIXED_GRAPHS, MIXED_PROMPTS, mixed_rows
from anycore.contract.sizes import Limits

if TYPE_CHECKING:
    from anycore.contract.backend import StepOutput, WholeStep
    from anycore.contract.ops import Ops

DECODING = (8, 64)
"""Requests that decode beside them, at most; the next kind of step has room for all that can run."""

EARLY_ROWS = 256
"""Steps up to so many rows, beside few that decode, are captured in the warm-up, all others in pauses: capturing takes
some 40 ms, which no request should wait for."""

WORTH = 0.8
"""Captured steps are kept that take less than so much of what launching takes."""

log = logging.getLogger(__name__)

Kind = tuple[int, int]
"""Rows, and requests that decode."""


class Renewable(Protocol):
    """A plan of a step that is captured: its sizes stay, and what it holds on the device is that of the last batch."""

    def renew(self, batch: Batch) -> None:
        """Take over a batch that has no more rows, decoding requests and prompts than there is room for."""


class Buffers:
    """What captured steps read, for the largest of them."""

    def __init__(self, rows: int, limits: Limits, device: torch.device) -> None:
        requests = limits.max_num_seqs + MIXED_PROMPTS
        self.ids, self.positions, self.slots = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(requests, dtype=torch.int64, device=device)
        self.lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        blocks = -(-limits.max_model_len // limits.block_size)
        self.tables = torch.zeros(requests, blocks, dtype=torch.int32, device=device)


class MixedSteps:
    """Captured steps with prompts, and the buffers that they read."""

    def __init__(self, step: WholeStep, ops: Ops, limits: Limits, device: torch.device, capture: Capture) -> None:
        self.step = step
        self.ops = ops
        self.capture = capture
        self.rows = mixed_rows(limits.max_num_batched_tokens)
        self.decoding = [size for size in DECODING if size < limits.max_num_seqs] + [limits.max_num_seqs]
        self._recorded: dict[Kind, tuple[Replay, Tensor] | None] = {}
        self._plans: dict[Kind, Renewable] = {}
        self._spare: Batch | None = None  # one that stores nothing that anybody reads
        self._limits = limits
        self._device = device

    def __call__(self, batch: Batch) -> Tensor | None:
        """The hidden states of a batch's wanted rows; None where the step has to run as it is."""
        kind = self.kind_of(batch)
        recorded = None if kind is None else self._recorded.get(kind)
        if kind is None or recorded is None:
            return None
        assert batch.output_rows is not None
        replay, rows = recorded
        self._fill(batch, kind)
        batch.padding = kind[0] - len(batch.input_ids)
        replay(batch)
        return rows[: len(batch.output_rows)].clone()  # the caller keeps them longer than until the next replay

    def warm_up(self, batch: Batch) -> None:
        """Capture the kinds that a server at low load meets first. The batch stores nothing that anybody reads."""
        self._spare = batch
        for rows in list(self.rows):
            if rows in self.rows and len(batch.input_ids) <= rows <= EARLY_ROWS:
                self._record(batch, (rows, self.decoding[0]))

    def use_pause(self) -> bool:
        """Capture one more kind while nobody waits; return whether there was one."""
        if self._spare is None:
            return False
        least = max(len(self._spare.input_ids), self._spare.query_lens.count(1))
        for decoding in self.decoding:
            for rows in self.rows:
                if rows >= least and (rows, decoding) not in self._recorded:
                    self._record(self._spare, (rows, decoding))
                    return True
            least = max(least, decoding)  # fewer rows have fewer requests that decode
        return False

    def kind_of(self, batch: Batch) -> Kind | None:
        """Which captured step has room for a batch."""
        count = len(batch.input_ids)
        if not self.rows or count > self.rows[-1] or batch.kv is None or batch.token_types is not None:
            return None
        if batch.decode_only:  # with rows that nobody wants
            return None
        lens, contexts = batch.query_lens, batch.context_lens
        decoding = sum(rows == 1 and before > 0 for rows, before in zip(lens, contexts, strict=True))
        wanted = 0 if batch.output_rows is None else len(batch.output_rows)
        if len(lens) - decoding >= MIXED_PROMPTS or not 0 < wanted <= len(lens):
            return None
        rows = next(size for size in self.rows if size >= count)
        return rows, next(size for size in self.decoding if size >= decoding)

    def _record(self, batch: Batch, kind: Kind) -> None:
        self._recorded[kind] = None
        if len(self._plans) >= MIXED_GRAPHS:
            return
        mine = self._batch(batch, kind)
        plan = self.ops.renewable(mine, decoding=kind[1], prompts=MIXED_PROMPTS)
        if plan is None:
            self.rows = []
            return
        mine.plan, self._plans[kind] = plan, plan
        self._fill(batch, kind)

        def work() -> StepOutput:
            return self.step(mine, None)

        # What it asks for is compiled and allocated then; it stores what the batch would.
        launching = _seconds(work, mine.input_ids, waits=False)
        try:
            replay, output = self.capture(work)
        except NotCaptured as error:
            log.info("steps with prompts are not captured: %s", error)
            self.rows = []
            return
        computing = _seconds(lambda: replay(batch), mine.input_ids, waits=True)
        log.debug("%d rows beside %d: %.2f ms to launch, %.2f to compute", *kind, 1e3 * launching, 1e3 * computing)
        # Ranks have to compute the same rows, and would not measure the same.
        if computing < WORTH * launching or self.ops.group.size > 1:
            self._recorded[kind] = replay, output.rows
        else:  # and so it is with more rows
            self.rows = [size for size in self.rows if size < kind[0]]

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers(self.rows[-1], self._limits, self._device)

    def _batch(self, like: Batch, kind: Kind) -> Batch:
        """The buffers' first places as a batch. Its host lengths mean nothing to a captured kernel."""
        rows, requests, mine = kind[0], kind[1] + MIXED_PROMPTS, self._buffers
        batch = replace(
            like,
            input_ids=mine.ids[:rows],
            positions=mine.positions[:rows],
            slots=mine.slots[:rows],
            query_lens=[0] * requests,
            context_lens=[0] * requests,
            output_rows=mine.wanted[:requests],
            block_tables=mine.tables[:requests],
            plan=None,
            shared_tokens=0,
            order=None,
        )
        batch.seq_lens_device, batch.query_starts_device = mine.lens[:requests], mine.starts[: requests + 1]
        return batch

    def _fill(self, batch: Batch, kind: Kind) -> None:
        """Bring a batch into the buffers; what is left over is nobody's."""
        count, requests, most = len(batch.input_ids), len(batch.query_lens), kind[1] + MIXED_PROMPTS
        assert batch.slots is not None
        assert batch.block_tables is not None
        assert batch.output_rows is not None
        wanted, columns, mine = len(batch.output_rows), batch.block_tables.shape[1], self._buffers
        mine.ids[:count].copy_(batch.input_ids)
        mine.positions[:count].copy_(batch.positions)
        mine.slots[:count].copy_(batch.slots)
        mine.slots[count : kind[0]].zero_()
        mine.lens[:requests].copy_(batch.seq_lens_device)
        mine.lens[requests:most].zero_()
        mine.starts[: requests + 1].copy_(batch.query_starts_device)
        mine.starts[requests + 1 : most + 1].fill_(count)
        mine.tables[:requests, :columns].copy_(batch.block_tables)
        mine.wanted[:wanted].copy_(batch.output_rows)
        mine.wanted[wanted:most].zero_()
        self._plans[kind].renew(batch)


def _seconds(work: Callable[[], Any], on: Tensor, waits: bool) -> float:
    """How long something takes on the device that holds `on`, or, unless it `waits`, on the host."""
    on[:1].cpu()  # what was launched before is done
    began = time.perf_counter()
    work()
    if waits:
        on[:1].cpu()
    return time.perf_counter() - began
