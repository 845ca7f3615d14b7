"""Steps that are recorded once and then replayed in one call, so that Python costs nothing a layer.

What decodes one token of each of some requests, and what encodes one text: there Python's share is large. It is small
in larger batches and in prompts, whose shapes hardly ever come again. Recording a step is running it, on buffers that
stay where they are: positions, slots, block tables and lengths are read from there, each time anew.
"""

from __future__ import annotations

import ctypes
import logging
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import StepOutput, WholeStep
from anycore.contract.batch import Batch, Sampling
from anycore.contract.sizes import Limits
from anycore_cpu.costs import REQUESTS, TEXT_ROWS
from anycore_cpu.kernels.attention import KernelPlan
from anycore_cpu.kernels.library import Kernels
from anycore_cpu.kernels.recording import Call, NotRecorded
from anycore_cpu.texts import Script, grouped, record

log = logging.getLogger(__name__)

Kind = tuple[int, bool, bool, bool]
"""Rows; whether they decode; whether segment ids and output rows are there."""


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded step: its calls, its batch, which lies in the buffers, and where it leaves the wanted rows: in memory
    that others take, too, so that they have to be copied from there at once.
    """

    calls: ctypes.Array[Call]
    kept: list[Any]
    batch: Batch
    rows: Tensor

    def copied(self) -> Tensor:
        """The wanted rows. torch would share out 32,768 numbers among threads of its own, and these then look for work
        on a core of ours for 4 ms.
        """
        rows = torch.empty_like(self.rows)
        ctypes.memmove(rows.data_ptr(), self.rows.data_ptr(), rows.nbytes)
        return rows


class ReplayStep:
    """A step function that replays what it has recorded, and passes everything else on."""

    def __init__(self, step: WholeStep, kernels: Kernels, limits: Limits) -> None:
        self.step = step
        self.kernels = kernels
        rows = REQUESTS if limits.block_size else TEXT_ROWS
        self._longs = torch.zeros(5, rows, dtype=torch.int64)  # ids, positions, slots, types, output rows
        self._lens = torch.zeros(rows, dtype=torch.int32)
        blocks = -(-limits.max_model_len // limits.block_size) if limits.block_size else 0
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32)
        self._programs: dict[Kind, Program | None] = {}
        self._caches: list[Any] = []  # that they store to
        self._scripts: dict[tuple[bool, bool, bool], Script | None] = {}  # causal; with segment ids; with output rows
        self._said: set[str] = set()

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        groups = grouped(batch.query_lens, self.kernels.threads) if batch.kv is None and sampling is None else None
        if groups is not None:
            script = self._script(batch)
            return self.step(batch, None) if script is None else StepOutput(script.run(self.kernels, batch, groups))
        kind = kind_of(batch)
        if kind is None:
            return self.step(batch, sampling)
        caches = batch.kv or []
        if len(self._caches) != len(caches) or any(map(operator.is_not, self._caches, caches)):
            self._programs.clear()
            self._caches = list(caches)
        if kind not in self._programs:
            self._programs[kind] = self._record(batch)
        program = self._programs[kind]
        if program is None:
            return self.step(batch, sampling)
        self._fill(program.batch, batch)
        self.kernels.replay(program.calls)
        rows = program.copied()
        if sampling is None:
            return StepOutput(rows)
        return StepOutput(rows, self.step.sample(rows[: len(sampling.temperature)], sampling))

    def _record(self, batch: Batch) -> Program | None:
        """Run the step on the buffers and write its calls down; None, with a word in the log, where that cannot be."""
        mine = self._batch(batch)
        self._fill(mine, batch)
        try:
            with self.kernels.recording() as recorder:
                rows = self.step.forward(mine)
        except NotRecorded as error:
            self._say(error)
            return None
        calls, kept = recorder.program()
        return Program(calls, kept, mine, unheld(rows))

    def _script(self, batch: Batch) -> Script | None:
        """What is run for groups of texts; None where they cannot be recorded, or wanted rows are not one a text."""
        if batch.output_rows is not None and not one_each(batch):
            return None
        kind = batch.causal, batch.token_types is not None, batch.output_rows is not None
        if kind not in self._scripts:
            try:
                self._scripts[kind] = record(self.step, self.kernels, batch)
            except NotRecorded as error:
                self._say(error)
                self._scripts[kind] = None
        return self._scripts[kind]

    def _say(self, error: NotRecorded) -> None:
        if str(error) not in self._said:
            log.warning("steps are not recorded, every operation is called from Python: %s", error)
        self._said.add(str(error))

    def _batch(self, like: Batch) -> Batch:
        """The first places of the buffers, as a batch of the same kind."""
        rows = len(like.input_ids)
        ids, positions, slots, types, outputs = self._longs
        paged = like.kv is not None
        batch = replace(
            like,
            input_ids=ids[:rows],
            positions=positions[:rows],
            slots=slots[:rows] if paged else None,
            block_tables=self._tables[:rows] if paged else None,
            token_types=None if like.token_types is None else types[:rows],
            output_rows=None if like.output_rows is None else outputs[: len(like.output_rows)],
        )
        if paged:
            batch.seq_lens_device = self._lens[:rows]
        batch.plan = KernelPlan(batch)
        batch.plan.common  # noqa: B018  its tensors, made before anything is recorded
        return batch

    def _fill(self, mine: Batch, batch: Batch) -> None:
        mine.input_ids.copy_(batch.input_ids)
        mine.positions.copy_(batch.positions)
        if batch.token_types is not None and mine.token_types is not None:
            mine.token_types.copy_(batch.token_types)
        if batch.output_rows is not None and mine.output_rows is not None:
            mine.output_rows.copy_(batch.output_rows)
        if batch.slots is not None and mine.slots is not None:
            assert batch.block_tables is not None
            assert mine.block_tables is not None
            mine.slots.copy_(batch.slots)
            mine.seq_lens_device.copy_(batch.seq_lens_device)
            mine.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)


def unheld(rows: Tensor) -> Tensor:
    """The same memory, which its arena gives to others none the less when `rows` are gone."""
    assert rows.is_contiguous()
    place = (ctypes.c_char * rows.nbytes).from_address(rows.data_ptr())
    return torch.frombuffer(place, dtype=rows.dtype).view(rows.shape)


def one_each(batch: Batch) -> bool:
    """Whether the wanted rows are one of each request, in order."""
    assert batch.output_rows is not None
    if len(batch.output_rows) != len(batch.query_lens):
        return False
    starts = batch.query_starts_device
    return bool(((batch.output_rows >= starts[:-1]) & (batch.output_rows < starts[1:])).all())


def kind_of(batch: Batch) -> Kind | None:
    """What a batch has in common with others that the same calls compute; None: it is not recorded."""
    rows = len(batch.input_ids)
    if batch.kv is None:
        if len(batch.query_lens) > 1 or rows > TEXT_ROWS:
            return None
    elif not batch.decode_only or batch.output_rows is not None or rows > REQUESTS:
        return None
    return rows, batch.kv is not None, batch.token_types is not None, batch.output_rows is not None
