"""Block tables of running requests as one host array: a request has a seat, and only its new blocks are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anycore.contract.sizes import Limits
from anycore.engine.request import Request, Status

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Seat:
    """A row of the array. `blocks` is the request's own list: it gets another one when its blocks are taken."""

    request: Request
    row: int
    blocks: list[int]
    written: int


class BlockTables:
    """Rows for `max_num_seqs` requests; those that have left make room when a row is needed."""

    def __init__(self, limits: Limits) -> None:
        self.size = limits.block_size
        columns = -(-limits.max_model_len // self.size) if self.size else 0
        self._table = np.zeros((limits.max_num_seqs, columns), dtype=np.int32)
        self._free = list(range(limits.max_num_seqs))
        self._seats: dict[int, Seat] = {}

    def rows(self, requests: list[Request]) -> list[int]:
        """The row of each request, with all of its blocks written."""
        return [self._row(request) for request in requests]

    def address(self, rows: list[int], columns: int, owner: Array, positions: Array) -> list[Array]:
        """The first `columns` blocks of some rows [B, P] int32, and the slots [T] int64 of tokens at `positions`.

        `owner` [T] says whose each token is, as an index into `rows`.
        """
        tables = self._table[rows, :columns]
        slots = tables[owner, positions // self.size].astype(np.int64) * self.size + positions % self.size
        return [tables, slots]

    def _row(self, request: Request) -> int:
        seat = self._seats.get(id(request))
        blocks = request.blocks
        if seat is None or seat.request is not request:
            seat = self._seats[id(request)] = Seat(request, self._seat(), blocks, 0)
        elif seat.blocks is not blocks:
            seat.blocks, seat.written = blocks, 0
        if seat.written == 0:
            self._table[seat.row] = 0
        if seat.written < len(blocks):
            self._table[seat.row, seat.written : len(blocks)] = blocks[seat.written :]
            seat.written = len(blocks)
        return seat.row

    def _seat(self) -> int:
        if not self._free:
            gone = [key for key, seat in self._seats.items() if seat.request.status is not Status.RUNNING]
            self._free += [self._seats.pop(key).row for key in gone]
        return self._free.pop()
