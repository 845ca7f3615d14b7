"""Block tables of running requests as one host array: a row is a request's seat, and only new blocks are written."""

from __future__ import annotations

from typing import Any

import numpy as np

from anycore.contract.sizes import Limits
from anycore.engine.sequence import Request

Array = np.ndarray[Any, Any]


class BlockTables:
    """Rows for `max_num_seqs` requests, by `Request.seat`."""

    def __init__(self, limits: Limits) -> None:
        self.size = limits.block_size
        columns = -(-limits.max_model_len // self.size) if self.size else 0
        self._table = np.zeros((limits.max_num_seqs, columns), dtype=np.int32)
        # What is written: a request's own list, which is another one after its blocks were taken, and how much of it.
        self._lists: list[list[int]] = [[] for _ in range(limits.max_num_seqs)]
        self._written = [0] * limits.max_num_seqs

    def write(self, requests: list[Request]) -> None:
        """Take over the blocks of some requests as they are now."""
        for request in requests:
            row, blocks = request.seat, request.blocks
            if self._lists[row] is not blocks:
                self._lists[row], self._written[row] = blocks, 0
                self._table[row] = 0
            first = self._written[row]
            self._table[row, first : len(blocks)] = blocks[first:]
            self._written[row] = len(blocks)

    def first(self, rows: Array, columns: int) -> Array:
        """The first `columns` blocks of some rows, [B, P] int32."""
        return self._table[rows, :columns]

    def blocks(self, rows: Array, columns: Array) -> Array:
        """One block of each of some rows."""
        return self._table[rows, columns]

    def slots(self, rows: Array, positions: Array) -> Array:
        """[T] int64: where tokens are stored that belong to some rows, one each."""
        blocks, offsets = np.divmod(positions, self.size)
        return self._table[rows, blocks].astype(np.int64) * self.size + offsets

    def shared(self, rows: Array, computed: int) -> int:
        """How many first tokens, of `computed` at most, lie in the same blocks for all of these rows."""
        first = self._table[rows, 0]
        if len(rows) == 1 or (first != first[0]).any():
            return 0
        tables = self._table[rows, : computed // self.size]
        other = (tables != tables[0]).any(axis=0)
        return int(other.argmax() if other.any() else len(other)) * self.size
