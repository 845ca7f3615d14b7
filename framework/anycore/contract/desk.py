"""Where the numbers of decode steps lie on a device: always in the same places, where captured steps look for them.

They are written on the host and sent together, so that a step costs one transfer however many numbers it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.pinned import cut, grouped, starts_of
from anycore.contract.sizes import Limits

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Numbers that travel together: as they are for rows that belong to nobody, on the host now, on the device."""

    blank: Tensor
    here: Tensor
    there: Tensor


class Desk:
    """Places for one row of each request that can run.

    A step function that has a desk, as its attribute `desk`, is given decode steps that lie there. What `lay` and
    `view` return holds a step's numbers from one `send` to the next, in the order of what is launched.
    """

    def __init__(self, memory: Memory, limits: Limits, draw_dtype: torch.dtype) -> None:
        most = limits.max_num_seqs
        every = torch.arange(most)
        blank = {
            "ids": torch.zeros_like(every),
            "positions": torch.zeros_like(every),
            "slots": every % limits.block_size,  # within the scratch block
            "unseen": torch.zeros_like(every),  # rows whose id only the device has, and where in the last samples
            "places": torch.zeros_like(every),
            "cells": torch.zeros_like(every),  # places in `tables`, and what comes there
            "blocks": torch.zeros(most, dtype=torch.int32),
            "lens": torch.ones(most, dtype=torch.int32),  # one token is seen, of the scratch block
            "order": every.to(torch.int32),
            "temperature": torch.ones(most),
            "uniforms": torch.zeros(most, dtype=draw_dtype),
        }
        self.tables = torch.zeros(most, -(-limits.max_model_len // limits.block_size), dtype=torch.int32)
        self.tables = self.tables.to(memory.device)
        self._memory = memory
        self._sheets: list[Sheet] = []
        self._blank: dict[str, Array] = {}
        self._here: dict[str, Array] = {}
        self._there: dict[str, Tensor] = {}
        self._views: dict[tuple[str, int], Tensor] = {}
        self._is_sent = True
        for dtype, names in grouped(blank, memory.typed).items():
            like = [blank[name] for name in names]
            starts = starts_of(like)
            flat = torch.zeros(starts[-1] // dtype.itemsize, dtype=dtype)
            for part, tensor in zip(cut(flat, starts, like), like, strict=True):
                part.copy_(tensor)
            sheet = Sheet(flat, flat.clone(), memory.upload(flat.clone()))
            self._sheets.append(sheet)
            self._blank |= {name: x.numpy() for name, x in zip(names, cut(sheet.blank, starts, like), strict=True)}
            self._here |= {name: x.numpy() for name, x in zip(names, cut(sheet.here, starts, like), strict=True)}
            self._there |= dict(zip(names, cut(sheet.there, starts, like), strict=True))

    def view(self, name: str, count: int) -> Tensor:
        """The places of the first `count` rows, the same tensor every time."""
        found = self._views.get((name, count))
        if found is None:
            found = self._views[name, count] = self.tables[:count] if name == "tables" else self._there[name][:count]
        return found

    def lay(self, name: str, numbers: Array | Sequence[int]) -> Tensor:
        """Write the first rows' numbers, those of all others becoming nobody's; they are sent later."""
        count = len(numbers)
        here = self._here[name]
        here[:count] = numbers
        here[count:] = self._blank[name][count:]
        self._is_sent = False
        return self.view(name, count)

    def send(self) -> None:
        """Bring what was laid to the device."""
        if not self._is_sent:
            for sheet in self._sheets:
                self._memory.renew(sheet.there, sheet.here)
            self._is_sent = True

    def clear(self) -> None:
        """Let all rows on the device belong to nobody."""
        for sheet in self._sheets:
            self._memory.renew(sheet.there, sheet.blank)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """All rows belong to nobody for a while; then the device has what it had before."""
        before = [sheet.there.clone() for sheet in self._sheets]
        self.clear()
        yield
        for sheet, kept in zip(self._sheets, before, strict=True):
            sheet.there.copy_(kept)
