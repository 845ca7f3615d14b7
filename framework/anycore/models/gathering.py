"""Copies a checkpoint's tensors into host memory, piece by piece: where each goes, and what becomes of its format."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from anycore.contract.weights import QuantisedWeight
from anycore.errors import WeightsError
from anycore.models.checkpoint import Checkpoint, Entry, Ordered
from anycore.models.cutting import cut_out
from anycore.models.parallel import Cut
from anycore.models.quantization import Piece

DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
READERS = 4
"""Threads that copy tensors out of the files, which is when these are read, and cast them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: rows `first` to `first + rows` of a piece of a parameter."""

    piece: Piece
    first: int
    rows: int
    kept: bool  # the piece has the format that its tensors come in
    cut: Cut | None = None  # the part of the tensor that it is, where ranks share it

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.piece.parameter.shape[1:])

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        return self.shape if self.cut is None else self.cut.whole

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def key(self) -> tuple[str, int]:
        return self.piece.parameter.name, self.piece.first


@dataclass
class Gathered:
    """A piece under way, or complete: one dense matrix or vector, or one quantised matrix."""

    host: Tensor | QuantisedWeight
    left: int  # rows still to come
    order: Tensor | None = None  # of the columns: see `checkpoint.Ordered`


def copied(
    places: dict[str, Place], checkpoint: Checkpoint, dtype: str, most: int
) -> Iterator[tuple[Place, Gathered | None]]:
    """Yield each tensor's place once its rows are copied, and with the last of a piece the piece.

    Several threads copy ahead of the caller, who sends what is whole to the device meanwhile; up to `most` bytes.
    """
    begun: dict[tuple[str, int], Gathered] = {}
    under_way: deque[tuple[Future[int], Place, Gathered | None]] = deque()
    ahead = 0  # bytes

    def oldest() -> tuple[Place, Gathered | None]:
        nonlocal ahead
        copy, place, whole = under_way.popleft()
        ahead -= copy.result()
        return place, whole

    with ThreadPoolExecutor(READERS, "weights") as readers:
        for name, entry in checkpoint.tensors():
            place = places.get(name)
            if place is None:
                continue
            check_entry(entry, place, f"{checkpoint.file_of(name)}: {name}")
            if place.cut is not None:
                entry = cut_out(entry, place.cut, place.kept, name)
            if place.key not in begun:
                begun[place.key] = begin(place, entry, dtype)
            piece = begun[place.key]
            if isinstance(entry, Ordered) and place.kept:
                note_order(piece, entry, f"{checkpoint.file_of(name)}: {name}")
            piece.left -= place.rows
            whole = None if piece.left else begun.pop(place.key)
            under_way.append((readers.submit(put, entry, piece.host, place), place, whole))
            ahead += sum(part.nbytes for part in rows_of(piece.host, place))
            del entry, piece, whole  # nothing is held longer than it takes
            while ahead > most:
                yield oldest()
        while under_way:
            yield oldest()


def check_entry(entry: Entry, place: Place, what: str) -> None:
    """A reader gives what its headers promised.

    Raises:
        WeightsError: it does not.
    """
    weight = entry.weight if isinstance(entry, Ordered) else entry
    if isinstance(weight, Tensor):
        if weight.dtype not in DENSE:
            raise WeightsError(f"{what} is {weight.dtype}, and nothing says how it is quantised")
        if place.kept:
            raise WeightsError(f"{what} is dense, though its file said that it is quantised")
    elif weight.shape != place.whole:
        raise WeightsError(f"{what} has shape {list(weight.shape)}, not {list(place.whole)}")


def begin(place: Place, entry: Entry, dtype: str) -> Gathered:
    """Host memory for a whole piece."""
    weight = entry.weight if isinstance(entry, Ordered) else entry
    kind = getattr(torch, "float32" if place.piece.parameter.exact else dtype)
    with torch.inference_mode(False):  # which other threads are not in
        if place.kept:
            assert not isinstance(weight, Tensor)
            empty: dict[str, Any] = {
                name: torch.empty((place.piece.rows, *part.shape[1:]), dtype=part.dtype)
                for name, part in tensors(weight).items()
            }
            return Gathered(replace(weight, **empty, dtype=kind), place.piece.rows)
        return Gathered(torch.empty(place.piece.shape, dtype=kind), place.piece.rows)


def put(entry: Entry, host: Tensor | QuantisedWeight, place: Place) -> int:
    """Copy a tensor to its rows, dense where they are; return how many bytes they have."""
    order = entry.order if isinstance(entry, Ordered) else None
    weight = entry.weight if isinstance(entry, Ordered) else entry
    targets = rows_of(host, place)
    if isinstance(host, Tensor):
        if not isinstance(weight, Tensor):
            weight = replace(weight, dtype=host.dtype).dense()
        if order is not None:
            weight = torch.empty_like(weight).index_copy_(1, order, weight)
        targets[0].copy_(weight)
    else:
        assert not isinstance(weight, Tensor)
        for target, part in zip(targets, tensors(weight).values(), strict=True):
            target.copy_(part)
    return sum(target.nbytes for target in targets)


def note_order(piece: Gathered, entry: Ordered, what: str) -> None:
    """Parts of a fused matrix are multiplied by the same columns.

    Raises:
        WeightsError: they do not agree.
    """
    if piece.order is not None and not torch.equal(piece.order, entry.order):
        raise WeightsError(
            f"{what} has its columns in another order (g_idx) than the matrices it is multiplied with: "
            "take --quantization none, which makes them dense"
        )
    piece.order = entry.order


def tensors(weight: QuantisedWeight) -> dict[str, Tensor]:
    """The tensors of a quantised weight by field."""
    found = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def rows_of(host: Tensor | QuantisedWeight, place: Place) -> list[Tensor]:
    """The rows of a piece that are one tensor's."""
    every = [host] if isinstance(host, Tensor) else list(tensors(host).values())
    return [part[place.first : place.first + place.rows] for part in every]
