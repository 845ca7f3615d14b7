"""Batches from a step's entries: built on the host with whole arrays, sent to the device in one transfer.

Where the backend has a desk, steps that only decode are laid there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import Batch, Samples
from anycore.contract.desk import Desk
from anycore.contract.sizes import Limits
from anycore.engine.scheduler import Step
from anycore.engine.sequence import Request
from anycore.engine.tables import Array, BlockTables
from anycore.models.spec import ModelSpec

Sending = Callable[[], Batch]
"""Sends what was laid out on the host to the device. To be called once the step before is sampled."""


class BatchBuilder:
    """Builds the batch of a step, given the samples of the step before: a row whose token the host has not seen yet
    takes its id from them, on the device.

    What the host has to do of it needs no samples. So it comes first, while a step before may still wait for its own.
    """

    def __init__(
        self, spec: ModelSpec, memory: Memory, limits: Limits, kv: list[Any] | None, desk: Desk | None = None
    ) -> None:
        self.spec = spec
        self.memory = memory
        self.limits = limits
        self.kv = kv
        self.desk = desk
        self.tables = BlockTables(limits)
        self._samples: Samples | None = None  # of the step before
        self._sampled = np.zeros(0, dtype=np.int64)  # seats of those whose they are
        self._places = np.full(limits.max_num_seqs, -1, dtype=np.int64)  # of seats in them; -1: not sampled
        self._starts = np.zeros(0, dtype=np.int64)  # first position of each entry of the last batch
        self._ends = self._starts  # and the one after its last
        self._seats = np.zeros(0, dtype=np.int64)  # of their requests
        self._lens: list[int] = []
        self._shared: int | None = None  # tokens that all share; None: not looked for since the batch has changed
        self._order: Tensor | None = None  # the longest first, found along with it: all grow alike

    def expect(self, seats: Array) -> None:
        """Take note of whose rows the step just launched samples: one row for each of some seats."""
        if seats is not self._sampled:
            self._sampled = seats
            self._places.fill(-1)
            self._places[seats] = np.arange(len(seats))

    def remember(self, samples: Samples | None) -> None:
        """Take note of what that step has sampled."""
        self._samples = samples

    def build(self, step: Step, output_rows: Array) -> Sending:
        """Any step. A token that the host has not seen is a request's last, sampled by the step just before.

        `output_rows` are those whose hidden states are wanted.
        """
        if self.kv is None:
            return self._whole(step, output_rows)
        decodes = len(step.decodes)
        chunked = [chunk.request for chunk in step.chunks]
        lens = extended(np.ones(decodes, dtype=np.int64), [chunk.rows for chunk in step.chunks])
        starts = extended(step.positions, [chunk.start for chunk in step.chunks])
        self._seats = extended(step.seats, [request.seat for request in chunked])
        self._write_tables(step.decodes, starts[:decodes])
        self.tables.write(chunked)
        ids, unseen, sampled = self._ids(step)
        ends = np.cumsum(lens)
        every = len(output_rows) == len(ids) and np.array_equal(output_rows, np.arange(len(ids)))
        self._starts, self._ends, self._lens, self._shared = starts, starts + lens, lens.tolist(), None
        if self.desk is not None and every and len(ids) == len(lens):
            return self._lay_new(self.desk, ids, unseen, sampled)
        arrays = [ids, np.array([] if every else output_rows, dtype=np.int64), unseen, sampled]
        owner = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(ends[-1]) + (starts - (ends - lens))[owner]

        def send() -> Batch:
            batch, sent = self._send(positions, owner, lens, arrays)
            batch.input_ids = sent[0]
            if not every:
                batch.output_rows = sent[1]
            if len(unseen):
                assert self._samples is not None
                batch.input_ids.index_copy_(0, sent[2], self._samples.ids[sent[3]])
            return batch

        return send

    def _whole(self, step: Step, output_rows: Array) -> Sending:
        """Requests from end to end: without a cache nothing was computed before, and nothing is sampled."""
        lens = [chunk.rows for chunk in step.chunks]
        ids = np.concatenate([chunk.request.tokens for chunk in step.chunks])
        ends = np.cumsum(lens)
        arrays = [
            ids,
            np.arange(len(ids)) - np.repeat(ends - lens, lens),
            np.array(lens, dtype=np.int32),
            np.concatenate(([0], ends)).astype(np.int32),
        ]
        every = len(output_rows) == len(ids)  # they are in order, each once
        if not every:
            arrays.append(output_rows)
        if self.spec.token_type_count:
            segments = (chunk.request.new.token_types or [0] * chunk.rows for chunk in step.chunks)
            arrays.append(np.array([number for segment in segments for number in segment], dtype=np.int64))

        def send() -> Batch:
            sent = self.memory.upload_all([torch.from_numpy(array) for array in arrays])
            batch = Batch(
                input_ids=sent[0],
                positions=sent[1],
                query_lens=lens,
                context_lens=[0] * len(lens),
                output_rows=None if every else sent[4],
                causal=self.spec.attention == "causal",
                token_types=sent[-1] if self.spec.token_type_count else None,
            )
            batch.seq_lens_device, batch.query_starts_device = sent[2], sent[3]
            return batch

        return send

    def next_tokens(self, requests: list[Request]) -> Sending:
        """A step that goes on with the token that the last one samples for each of its requests, in the same order."""
        count, starts = len(requests), self._ends
        self._starts, self._ends, self._lens = starts, starts + 1, [1] * count
        grown = self._write_tables(requests, starts)
        laid = None if self.desk is None else self._lay(self.desk, grown)

        def send() -> Batch:
            batch = laid() if laid is not None else self._send(starts, np.arange(count), np.ones_like(starts), [])[0]
            assert self._samples is not None
            batch.input_ids = self._samples.ids
            return batch

        return send

    def _ids(self, step: Step) -> tuple[Array, Array, Array]:
        """The ids of a step's rows, the rows of those that the device has, and where in the last samples."""
        places = self._places[self._seats[: len(step.decodes)]]
        unseen = np.flatnonzero(places >= 0)
        sampled = places[unseen]
        ids = np.zeros(len(places), dtype=np.int64)
        for row in np.flatnonzero(places < 0).tolist():
            ids[row] = step.decodes[row].tokens[-1]
        tokens = array("q")
        for chunk in step.chunks:
            tokens += chunk.request.tokens[chunk.start : chunk.start + chunk.rows]
            if chunk.start + chunk.rows > len(chunk.request.tokens):
                unseen = np.append(unseen, len(ids) + len(tokens))
                sampled = np.append(sampled, self._places[chunk.request.seat])
                tokens.append(0)
        return np.concatenate((ids, tokens)), unseen, sampled

    def _write_tables(self, requests: list[Request], positions: Array) -> Array:
        """Write the blocks that tokens at `positions`, one of each request, are the first in; return whose they are."""
        grown = np.flatnonzero(positions % self.limits.block_size == 0)
        self.tables.write([requests[i] for i in grown.tolist()])
        return grown

    def _lay_new(self, desk: Desk, ids: Array, unseen: Array, sampled: Array) -> Sending:
        desk.lay("ids", ids)
        rows, at = desk.lay("unseen", unseen), desk.lay("places", sampled)
        laid = self._lay(desk, np.zeros(0, dtype=np.int64))

        def send() -> Batch:
            batch = laid()
            if len(unseen):
                assert self._samples is not None
                batch.input_ids.index_copy_(0, rows, self._samples.ids.index_select(0, at))
            return batch

        return send

    def _lay(self, desk: Desk, grown: Array) -> Sending:
        """One row of each request. `grown` are those that have a new block since they were laid."""
        count, size, starts = len(self._starts), self.limits.block_size, self._starts
        desk.lay("positions", starts)
        desk.lay("slots", self.tables.slots(self._seats, starts))
        desk.lay("lens", self._ends)
        changed = self._shared is None
        if self._shared is None:
            self._shared = self.tables.shared(self._seats, int(starts.min()))
            desk.lay("order", np.argsort(-starts, kind="stable"))
        elif len(grown):
            columns = starts[grown] // size
            cells = desk.lay("cells", grown * desk.tables.shape[1] + columns)
            blocks = desk.lay("blocks", self.tables.blocks(self._seats[grown], columns))
        batch = Batch(
            input_ids=desk.view("ids", count),
            positions=desk.view("positions", count),
            query_lens=self._lens,
            context_lens=starts.tolist(),
            output_rows=None,
            causal=self.spec.attention == "causal",
            slots=desk.view("slots", count),
            block_tables=desk.view("tables", count),
            kv=self.kv,
            block_size=size,
            shared_tokens=self._shared,
            order=desk.view("order", count),
        )
        batch.seq_lens_device = desk.view("lens", count)

        def send() -> Batch:
            desk.send()
            if changed:
                tables = self.tables.first(self._seats, int(starts.max()) // size + 1)
                self.memory.renew(desk.tables[:count, : tables.shape[1]], torch.from_numpy(tables))
            elif len(grown):
                desk.tables.view(-1).index_copy_(0, cells, blocks)
            return batch

        return send

    def _send(self, positions: Array, owner: Array, lens: Array, more: list[Array]) -> tuple[Batch, list[Tensor]]:
        """Everything but the ids: the batch, and the further arrays on the device."""
        if self.desk is not None:
            self.desk.send()  # what sampling has laid there
        columns = (int(self._ends.max()) - 1) // self.limits.block_size + 1
        arrays = [
            positions,
            self._ends.astype(np.int32),
            np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
            self.tables.first(self._seats, columns),
            self.tables.slots(self._seats[owner], positions),
        ]
        decodes = len(positions) == len(lens)
        if decodes and self._shared is None:  # the batch has changed
            self._shared = self.tables.shared(self._seats, int(self._starts.min()))
            self._order = None
            arrays.append(np.argsort(-self._starts, kind="stable").astype(np.int32))
        sent = self.memory.upload_all([torch.from_numpy(array) for array in (*arrays, *more)])
        batch = Batch(
            input_ids=sent[0],
            positions=sent[0],
            query_lens=self._lens,
            context_lens=self._starts.tolist(),
            output_rows=None,
            causal=self.spec.attention == "causal",
            slots=sent[4],
            block_tables=sent[3],
            kv=self.kv,
            block_size=self.limits.block_size,
        )
        batch.seq_lens_device, batch.query_starts_device = sent[1], sent[2]
        if decodes and self._shared is not None:
            self._order = sent[5] if self._order is None else self._order
            batch.shared_tokens, batch.order = self._shared, self._order
        return batch, sent[len(arrays) :]


def extended(numbers: Array, more: list[int]) -> Array:
    return np.concatenate((numbers, np.array(more, dtype=np.int64)))
