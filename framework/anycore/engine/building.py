"""Batches from a step's entries: built on the host with whole arrays, sent to the device in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import Batch, Samples
from anycore.contract.sizes import Limits
from anycore.engine.request import Request
from anycore.engine.scheduler import Step
from anycore.engine.tables import BlockTables
from anycore.models.spec import ModelSpec

Array = np.ndarray[Any, Any]


class BatchBuilder:
    """Builds the batch of a step, given the samples of the step before: a row whose token the host has not seen yet
    takes its id from them, on the device.
    """

    def __init__(self, spec: ModelSpec, memory: Memory, limits: Limits, kv: list[Any] | None) -> None:
        self.spec = spec
        self.memory = memory
        self.limits = limits
        self.kv = kv
        self.tables = BlockTables(limits)
        self._samples: Samples | None = None
        self._starts = np.zeros(0, dtype=np.int64)  # first position of each entry of the last batch
        self._rows = np.zeros(0, dtype=np.int64)  # their rows in the tables
        self._lens: list[int] = []
        self._shared: int | None = None  # tokens that all share; None: not looked for since the batch has changed
        self._order: Tensor | None = None  # the longest first, found along with it: all grow alike

    def remember(self, requests: list[Request], samples: Samples | None) -> None:
        """Take note of what the step just launched has sampled, one row a request."""
        self._samples = samples
        for row, request in enumerate(requests):
            request.place = row

    def build(self, step: Step, output_rows: list[int] | range) -> Batch:
        """Any step.

        A token that the host has not seen is a request's last, and was sampled by the step just before.
        """
        decodes, positions = step.decodes, step.positions
        ids = [request.tokens[-1] for request in decodes]  # put right below where the last one is not known yet
        unseen = [row for row, request in enumerate(decodes) if positions[row] == len(request.tokens)]
        places = [decodes[row].place for row in unseen]  # in the last samples
        for chunk in step.chunks:
            ids += chunk.request.tokens[chunk.start : chunk.start + chunk.rows]
            if chunk.start + chunk.rows > len(chunk.request.tokens):
                unseen.append(len(ids))
                places.append(chunk.request.place)
                ids.append(0)
        requests = decodes + [chunk.request for chunk in step.chunks]
        lens = np.ones(len(requests), dtype=np.int64)
        lens[len(decodes) :] = [chunk.rows for chunk in step.chunks]
        starts = np.array(positions + [chunk.start for chunk in step.chunks], dtype=np.int64)
        ends = np.cumsum(lens)
        owner = np.repeat(np.arange(len(requests)), lens)
        order = range(len(ids))
        every = output_rows == order or (len(output_rows) == len(order) and output_rows == list(order))
        parts = (ids, [] if every else output_rows, unseen, places)
        arrays = [np.array(part, dtype=np.int64) for part in parts]
        if self.spec.token_type_count:
            types = np.zeros(len(ids), dtype=np.int64)
            for chunk, end in zip(step.chunks, ends.tolist(), strict=True):
                if chunk.request.new.token_types:
                    types[end - chunk.rows : end] = chunk.request.new.token_types
            arrays.append(types)
        if self.kv is not None:
            self._rows = self.tables.rows(requests)
        self._starts, self._lens, self._shared = starts, lens.tolist(), None
        batch, sent = self._send(np.arange(ends[-1]) + (starts - (ends - lens))[owner], owner, lens, arrays)
        batch.input_ids = sent[0]
        if not every:
            batch.output_rows = sent[1]
        if unseen:
            assert self._samples is not None
            batch.input_ids.index_copy_(0, sent[2], self._samples.ids[sent[3]])
        if self.spec.token_type_count:
            batch.token_types = sent[4]
        return batch

    def next_tokens(self, requests: list[Request]) -> Batch:
        """A step that goes on with the token that the last one sampled for each of its requests, in the same order."""
        assert self._samples is not None
        count = len(requests)
        starts = self._starts + np.array(self._lens)
        self._starts, self._lens = starts, [1] * count
        grown = np.flatnonzero(starts % self.limits.block_size == 0)  # the others have no new block
        self.tables.rows([requests[i] for i in grown.tolist()])
        every = np.arange(count)
        batch, _ = self._send(starts, every, np.ones(count, dtype=np.int64), [])
        batch.input_ids = self._samples.ids
        return batch

    def _send(self, positions: Array, owner: Array, lens: Array, more: list[Array]) -> tuple[Batch, list[Tensor]]:
        """Everything but the ids: the batch, and the further arrays on the device."""
        arrays = [
            positions,
            (self._starts + lens).astype(np.int32),
            np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
        ]
        if self.kv is not None:
            columns = (int((self._starts + lens).max()) - 1) // self.limits.block_size + 1
            arrays += self.tables.address(self._rows, columns, owner, positions)
        decodes = self.kv is not None and len(positions) == len(lens)
        if decodes and self._shared is None:  # the batch has changed
            self._shared = self.tables.shared(self._rows, int(self._starts.min()))
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
        )
        batch.seq_lens_device, batch.query_starts_device = sent[1], sent[2]
        if self.kv is not None:
            batch.block_tables, batch.slots = sent[3], sent[4]
            batch.kv, batch.block_size = self.kv, self.limits.block_size
            if decodes and self._shared is not None:
                self._order = sent[5] if self._order is None else self._order
                batch.shared_tokens, batch.order = self._shared, self._order
        return batch, sent[len(arrays) :]
