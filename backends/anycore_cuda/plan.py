"""Who is computed by which kernel in one step, found once and used by every layer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import Batch
from anycore_cuda.kernels.decode import splits_of


class Plan:
    """Requests with one row and a history decode; all others are cut into tiles of rows.

    In a batch that only decodes nothing here depends on lengths, so it can be captured.
    """

    def __init__(self, batch: Batch, memory: Memory, processors: int) -> None:
        self.batch = batch
        self.memory = memory
        self.processors = processors
        self.decode_only = batch.decode_only
        self.fresh = False  # no request with several rows has a history
        self._tiles: dict[int, Tensor] = {}
        if self.decode_only:
            return
        lens = np.array(batch.query_lens, dtype=np.int32)
        context = np.array(batch.context_lens, dtype=np.int32)
        single = (lens == 1) & (context > 0)
        singles = np.flatnonzero(single).astype(np.int32)
        self.singles = singles[np.argsort(-context[singles], kind="stable")]
        self._others = np.flatnonzero(~single).astype(np.int32)
        self._lens = lens[self._others]
        self._ends = context[self._others] + self._lens
        self.fresh = not context[self._others].any()

    @cached_property
    def decoding(self) -> Tensor | None:
        """[n] int32: requests with one row among others, the longest first."""
        return None if self.decode_only or not len(self.singles) else self._upload(self.singles)

    def tiles(self, tokens: int) -> Tensor | None:
        """[n, 2] int32: (request, first row) of every tile of `tokens` rows, the longest work first."""
        if self.decode_only or not len(self._others):
            return None
        if tokens not in self._tiles:
            self._tiles[tokens] = self._upload(self.tiles_here(tokens))
        return self._tiles[tokens]

    def tiles_here(self, tokens: int) -> np.ndarray[Any, Any]:
        """The same, on the host."""
        counts = -(-self._lens // tokens)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
        work = self._ends[owner] - self._lens[owner] + first
        order = np.argsort(-work, kind="stable")
        return np.ascontiguousarray(np.stack((self._others[owner], first.astype(np.int32)), axis=1)[order])

    def splits(self, requests: int, kv_heads: int) -> int:
        """Programs per request and KV head."""
        return splits_of(requests, kv_heads, self.processors)

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self.memory.upload(torch.from_numpy(array))


class RoomyPlan(Plan):
    """A captured step's, for any batch of its sizes: as many programs start as one can want, nobody's find no rows."""

    def __init__(self, batch: Batch, decoding: int, prompts: int, memory: Memory, processors: int) -> None:
        self.memory = memory
        self.processors = processors
        self.decode_only = self.fresh = False
        self._rows, self._prompts = len(batch.input_ids), prompts
        self._nobody = len(batch.query_lens) - 1
        self._tiles = {}
        self._last: Plan | None = None  # of the batch that was put in
        self.decoding = torch.full((decoding,), self._nobody, dtype=torch.int32, device=memory.device)

    def renew(self, batch: Batch) -> None:
        """Take over what a batch's own plan has found."""
        self._last = batch.plan
        assert self.decoding is not None
        self._write(self.decoding, batch.plan.singles, self._nobody)
        for tokens, tiles in self._tiles.items():
            self._write(tiles, batch.plan.tiles_here(tokens), (self._nobody, 0))

    def tiles(self, tokens: int) -> Tensor:
        if tokens not in self._tiles:
            assert self._last is not None
            most = -(-self._rows // tokens) + self._prompts
            self._tiles[tokens] = torch.empty(most, 2, dtype=torch.int32, device=self.memory.device)
            self._write(self._tiles[tokens], self._last.tiles_here(tokens), (self._nobody, 0))
        return self._tiles[tokens]

    def _write(self, there: Tensor, here: np.ndarray[Any, Any], blank: int | tuple[int, int]) -> None:
        whole = np.empty(there.shape, dtype=np.int32)
        whole[: len(here)] = here
        whole[len(here) :] = blank
        self.memory.renew(there, torch.from_numpy(whole))
