"""Who is computed by which kernel in one step, found once and used by every layer."""

from __future__ import annotations

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
        self.decoding: Tensor | None = None  # [n] int32: requests with one row among others, the longest first
        self.fresh = False  # no request with several rows has a history
        self._tiles: dict[int, Tensor] = {}
        if self.decode_only:
            return
        lens = np.array(batch.query_lens, dtype=np.int32)
        context = np.array(batch.context_lens, dtype=np.int32)
        single = (lens == 1) & (context > 0)
        self._others = np.flatnonzero(~single).astype(np.int32)
        self._lens = lens[self._others]
        self._ends = context[self._others] + self._lens
        self.fresh = not context[self._others].any()
        if single.any():
            chosen = np.flatnonzero(single).astype(np.int32)
            self.decoding = self._upload(chosen[np.argsort(-context[chosen], kind="stable")])

    def tiles(self, tokens: int) -> Tensor | None:
        """[n, 2] int32: (request, first row) of every tile of `tokens` rows, the longest work first."""
        if self.decode_only or not len(self._others):
            return None
        if tokens not in self._tiles:
            counts = -(-self._lens // tokens)
            owner = np.repeat(np.arange(len(counts)), counts)
            first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
            work = self._ends[owner] - self._lens[owner] + first
            order = np.argsort(-work, kind="stable")
            tiles = np.stack((self._others[owner], first.astype(np.int32)), axis=1)[order]
            self._tiles[tokens] = self._upload(np.ascontiguousarray(tiles))
        return self._tiles[tokens]

    def splits(self, requests: int, kv_heads: int) -> int:
        """Programs per request and KV head."""
        return splits_of(requests, kv_heads, self.processors)

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self.memory.upload(torch.from_numpy(array))
