"""Rows of a quantised matrix made dense: tables that are looked up, and tiles that cuBLAS multiplies by many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import HIGH, LEFT, Packed, last_plane

WORKSPACE = 64 << 20
"""Bytes of a tile of rows that is dense at a time."""


@triton.jit
def e4m3_to_float(bits):
    # Of bytes, whatever the chip: a float16 has the same order of bits, one exponent bit more and seven bits behind.
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def bytes_to_float(tile, KIND: tl.constexpr, E4M3: tl.constexpr):
    if KIND == "int8":
        return tile.to(tl.float32)
    if E4M3:
        return tile.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e4m3_to_float(tile)


@triton.jit
def nibble(words, left, high, PLANE: tl.constexpr):
    """A plane's numbers and its origin: floats whose bits are put together, and what they are too large by.

    In three places of the mantissa they are near enough to the origin, so that two shifts serve all eight planes: by
    12 to the right, and by 8 to the `left`. That one is a product with LEFT, and `high` is HIGH, because the compiler
    must not know them: it would shift for every plane, and put bits together in two instructions instead of one.
    """
    BIT: tl.constexpr = 8 + 4 * PLANE if PLANE < 2 else 8 + 4 * ((PLANE - 2) % 3)
    if PLANE < 2:
        moved = left
    elif PLANE < 5:
        moved = words
    else:
        moved = words >> 12
    bits = (moved & (15 << BIT)) | (high - ((BIT - 8) << 23))
    return bits.to(tl.float32, bitcast=True), float(1 << (23 - BIT))


@triton.jit(do_not_specialize=["rows", "first"])
def _dense_bytes(
    data_ptr, scale_ptr, ids_ptr, out_ptr, rows, first, unit,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = here < rows
    row = tl.load(ids_ptr + here, mask=known, other=0).to(tl.int64) if INDEXED else (first + here).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = known[:, None] & (at < COLUMNS)[None, :]
    tile = tl.load(data_ptr + row[:, None] * COLUMNS + at[None, :], mask=inside, other=0)
    numbers = bytes_to_float(tile, KIND, False)
    if GROUP:
        place = scale_ptr + row[:, None] * GROUPS + (at // GROUP)[None, :]
        numbers = numbers * tl.load(place, mask=inside, other=0.0).to(tl.float32) * unit
    else:
        numbers = numbers * tl.load(scale_ptr + row, mask=known, other=0.0)[:, None]
    tl.store(
        out_ptr + here.to(tl.int64)[:, None] * COLUMNS + at[None, :], numbers.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["rows", "first"])
def _dense_nibbles(
    data_ptr, scale_ptr, ids_ptr, out_ptr, rows, first, unit, left, high,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LAST: tl.constexpr,
    INDEXED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = here < rows
    row = tl.load(ids_ptr + here, mask=known, other=0).to(tl.int64) if INDEXED else (first + here).to(tl.int64)
    word = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    words = tl.load(data_ptr + row[:, None] * WORDS + word[None, :], mask=known[:, None] & (word < WORDS)[None, :])
    block = word // 32
    plane = tl.where(block < COLUMNS // 256, 32, LAST) if LAST else 32
    for number in tl.static_range(8):
        at = block * 256 + number * plane + word % 32
        inside = known[:, None] & ((word < WORDS) & (at < COLUMNS))[None, :]
        pair = scale_ptr + 2 * (row[:, None] * GROUPS + (at // GROUP)[None, :])
        scale = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
        numbers, origin = nibble(words, words * left, high, number)
        numbers = ((numbers - origin) * scale - offset) * unit
        place = out_ptr + here.to(tl.int64)[:, None] * COLUMNS + at[None, :]
        tl.store(place, numbers.to(out_ptr.dtype.element_ty), mask=inside)


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
    given = weight.data, weight.scale, weight.data if ids is None else ids, out, count, first, weight.unit
    each = 1 if ids is not None else 8
    if weight.kind == "int4":
        words = weight.data.shape[1]
        launch(
            _dense_nibbles, (triton.cdiv(count, each), triton.cdiv(words, 128)), *given, LEFT, HIGH,
            COLUMNS=columns, WORDS=words, GROUP=weight.group, GROUPS=weight.groups, LAST=last_plane(columns),
            INDEXED=ids is not None, ROWS=each, WIDTH=128, num_warps=4,
        )  # fmt: skip
    else:
        launch(
            _dense_bytes, (triton.cdiv(count, each), triton.cdiv(columns, 512)), *given,
            COLUMNS=columns, GROUP=weight.group, GROUPS=weight.groups, KIND=weight.kind,
            INDEXED=ids is not None, ROWS=each, WIDTH=512, num_warps=4,
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
