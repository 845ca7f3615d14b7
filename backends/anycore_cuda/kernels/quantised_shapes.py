"""The programs that multiply a quantised matrix by several rows: their tiles, as measured to be fast on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from anycore_cuda.kernels.quantised import PLANES, Packed


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a program: outputs and rows of its tile, columns a turn, warps, stages of the pipeline, in how many parts
    the columns are split, and with 4 bits how many more rows: both counts are powers of two, and their sum need not be;
    so many tiles of outputs come first, which are not split.
    """

    outputs: int
    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1
    more: int = 0
    whole: int = 0


SHARED = 227 << 10
"""Bytes of shared memory that a program may have on Hopper."""
LARGE = 15 << 20
"""Numbers of a matrix: of smaller ones, tiles are too few for all processors."""


def shape_of(weight: Packed, rows: int, processors: int, shared: int = SHARED) -> Shape:
    """What a product with so many rows is made with.

    A tile as wide as the rows reads the matrix once, and rows again for each tile of outputs: between the cache and
    the processors there is little room, so that many rows want large tiles, and columns split until all are busy.
    """
    outputs, columns = weight.shape
    four = weight.kind == "int4"
    if four and rows > 64:
        return _wide(weight, rows, processors)
    tile = 64 if rows <= 32 or four else 128
    most = 256 if weight.rounds else 64 if four else 32
    each = min(most, max(16, triton.next_power_of_2(rows)))
    turn = (256 if each <= 32 else 128) if four else 128 if weight.rounds else 64
    while 2 * stage_bytes(weight, tile, each, turn) > shared and max(tile, each) > 16:
        tile, each = (tile // 2, each) if tile > 64 or each == 16 else (tile, each // 2)
    # Dots of 4 bits wait for each other: more programs at a time hide that, where fewer stages leave room for them.
    stages = max(2, min(3 if four else 4, shared // stage_bytes(weight, tile, each, turn)))
    # As many programs as run at a time, if columns are enough for eight turns each.
    resident = max(1, min(3, shared // (stages * stage_bytes(weight, tile, each, turn))))
    splits = resident * processors // (-(-outputs // tile) * -(-rows // each))
    splits = max(1, min(16, splits, columns // turn // (2 if four else 8)))
    return Shape(tile, each, turn, 8 if tile * each >= 128 * 128 else 4, stages, splits)


COUNTS = ((96, 64, 32), (128, 128, 0), (144, 128, 16), (160, 128, 32), (192, 128, 64))
"""Up to so many rows, in two counts."""


def _wide(weight: Packed, rows: int, processors: int) -> Shape:
    """4 bits and many rows where `quantised_wide` does not fit: a program to a processor, which widens a tile once for
    all of them. As many tiles as keep all processors busy are whole, what is left over is split among them.
    """
    outputs, columns = weight.shape
    each, more = next(((each, more) for most, each, more in COUNTS if rows <= most), (128, 0))
    # Of the matrix a turn less is under way than of the rows: words, and scales of narrow groups twice as much.
    matrix = 128 * 192
    stages = min(3, (SHARED + matrix) // ((each + more) * 2 * 128 + matrix))
    at_a_time = max(1, processors // -(-rows // (each + more)))
    whole, rest = divmod(-(-outputs // 128), at_a_time)
    splits = max(1, min(16, at_a_time // max(1, rest), columns // 512))
    return Shape(128, each, 128, 8, stages, splits, more, whole * at_a_time)


def stage_bytes(weight: Packed, outputs: int, rows: int, turn: int) -> int:
    """Shared memory of what is under way: tiles of the matrix and of rows; of four bits 32 words, with scales, which
    is more than a turn of half as many has.
    """
    if weight.kind == "int4":
        return outputs * (32 * 4 + 4 * PLANES) + rows * 2 * turn
    return turn * (outputs + rows * (1 if weight.rounds else 2)) + (0 if weight.rounds else turn * outputs)
