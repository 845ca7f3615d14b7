"""Rows of a quantised matrix made dense: tables that are looked up, and tiles that cuBLAS multiplies by many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.bytes_of_words import and_or, e4m3_to_float
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import Packed

WORKSPACE = 64 << 20
"""Bytes of a tile of rows that is dense at a time."""
TILE = 4096
"""Numbers of a program's tile: so many pieces of rows, each under one scale."""


@triton.jit
def bytes_to_float(tile, KIND: tl.constexpr):
    if KIND == "int8":
        return tile.to(tl.float32)
    return e4m3_to_float(tile)


@triton.jit
def pair_of(pairs):
    """A scale and an offset, of words that hold both as float16."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    offset = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def nibble(words, PLANE: tl.constexpr):
    """A plane's numbers and its origin: floats whose bits are put together, and what they are too large by.

    In three places of the mantissa they are near enough to the origin, so that few shifts serve all eight planes.
    """
    PLACE: tl.constexpr = 8 * (PLANE % 4) + 4 * (PLANE // 4)
    BIT: tl.constexpr = 8 + (PLACE + 4) % 12 if PLACE >= 8 else 8 + PLACE
    if PLACE < 8:
        moved = words << 8
    elif PLACE < 20:
        moved = words
    else:
        moved = words >> 12
    bits = and_or(moved, 15 << BIT, (150 - BIT) << 23)
    return bits.to(tl.float32, bitcast=True), float(1 << (23 - BIT))


@triton.jit
def _piece(ids_ptr, rows, first, PIECES: tl.constexpr, COUNT: tl.constexpr, INDEXED: tl.constexpr):
    # Rows of the result and of the matrix, and pieces within the row, of COUNT pieces of rows.
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    here = index // PIECES
    known = here < rows
    row = tl.load(ids_ptr + here, mask=known, other=0) if INDEXED else first + here
    return here.to(tl.int64), row.to(tl.int64), index % PIECES, known


@triton.jit(do_not_specialize=["rows", "first"])
def _dense_bytes(
    data_ptr, scale_ptr, ids_ptr, out_ptr, rows, first, unit,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, INDEXED: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    here, row, piece, known = _piece(ids_ptr, rows, first, PIECES, COUNT, INDEXED)
    at = (piece * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (at < COLUMNS)
    tile = tl.load(data_ptr + row[:, None] * COLUMNS + at, mask=inside, other=0)
    group = piece * WIDTH // GROUP if GROUP else 0
    scale = tl.load(scale_ptr + row * GROUPS + group, mask=known, other=0.0).to(tl.float32) * unit
    numbers = bytes_to_float(tile, KIND) * scale[:, None]
    tl.store(out_ptr + here[:, None] * COLUMNS + at, numbers.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "first"])
def _dense_nibbles(
    data_ptr, scale_ptr, ids_ptr, out_ptr, rows, first, unit,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, INDEXED: tl.constexpr,
    PIECES: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    here, row, piece, known = _piece(ids_ptr, rows, first, PIECES, COUNT, INDEXED)
    word = tl.arange(0, WIDTH)[None, :]
    words = tl.load(
        data_ptr + row[:, None] * (PIECES * WIDTH) + (piece * WIDTH)[:, None] + word, mask=known[:, None], other=0
    )
    pairs_at = scale_ptr.to(tl.pointer_type(tl.int32)) + row * GROUPS
    for plane in tl.static_range(8):
        column = piece * (8 * WIDTH) + plane * WIDTH
        if plane % 4 == 0:
            scale, offset = pair_of(tl.load(pairs_at + tl.minimum(column // GROUP, GROUPS - 1), mask=known, other=0))
            scale, offset = scale * unit, offset * unit
        numbers, origin = nibble(words, plane)
        numbers = (numbers - origin) * scale[:, None] - offset[:, None]
        at = column[:, None] + word
        inside = known[:, None] & (at < COLUMNS)
        tl.store(out_ptr + here[:, None] * COLUMNS + at, numbers.to(out_ptr.dtype.element_ty), mask=inside)


def dense_rows(
    weight: Packed, first: int = 0, count: int | None = None, ids: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Rows `first` and following, or those of `ids`, in the dtype that the matrix is multiplied by."""
    rows, columns = weight.shape
    count = len(ids) if ids is not None else rows - first if count is None else count
    if out is None:
        out = torch.empty(count, columns, dtype=weight.dtype, device=weight.device)
    if not count:
        return out
    four = weight.kind == "int4"
    # A piece of a row: a block of words, or a run of bytes within a group.
    width = weight.width if four else next(n for n in (64, 32, 16) if not weight.group or weight.group % n == 0)
    pieces = weight.data.shape[1] // width if four else triton.cdiv(columns, width)
    each = TILE // (width * (8 if four else 1))
    more = {} if four else {"KIND": weight.kind}
    launch(
        _dense_nibbles if four else _dense_bytes, (triton.cdiv(count * pieces, each),),
        weight.data, weight.scale, weight.data if ids is None else ids, out, count, first, weight.unit,
        COLUMNS=columns, GROUP=weight.group, GROUPS=weight.groups, INDEXED=ids is not None, PIECES=pieces, WIDTH=width,
        COUNT=each, **more, num_warps=4,
    )  # fmt: skip
    return out


def dense_product(x: Tensor, weight: Packed, dtype: torch.dtype) -> Tensor:
    """[R, I] times [O, I] → [R, O], a tile of the matrix made dense at a time: for many rows."""
    rows, columns = weight.shape
    each = min(rows, max(128, WORKSPACE // (columns * weight.dtype.itemsize) // 128 * 128))
    tile = torch.empty(each, columns, dtype=weight.dtype, device=weight.device)
    out = x.new_empty(len(x), rows, dtype=dtype)
    for first in range(0, rows, each):
        count = min(each, rows - first)
        part = dense_rows(weight, first, count, out=tile[:count])
        if dtype == x.dtype:
            torch.mm(x, part.t(), out=out[:, first : first + count])
        else:
            out[:, first : first + count] = torch.mm(x, part.t())
    return out
