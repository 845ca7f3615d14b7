"""A small matrix times 2 to 256 rows, where a product takes about as long as its launch, its start and its end do.

Tiles are small, so that nearly every processor has one; a program asks for its weights before it waits. Where columns
are many and rows of the matrix few, programs sum shares of the columns, and the norm that follows joins these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.gated import check_kind
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.products import PROCESSORS, _ask, _put, described

LEAST, MOST = 1 << 18, 10 << 20
"""Numbers of the matrices that shapes are for: measured on some of 0.8 to 8.7 million."""
MOST_ROWS, MOST_WIDTH, MOST_SPLITS = 256, 2048, 16
VARIANTS = (2, 32, 64, 128, 256)
"""Counts of rows: shapes, and with them kernels, differ between these only."""


class Shape(NamedTuple):
    """How a product is cut: a program has a tile of x's rows times one of the matrix's, or a share of its columns."""

    rows: int  # of x in a tile
    outs: int  # rows of the matrix in a tile; of either half, if gated
    columns: int  # of a turn
    warps: int
    stages: int
    ahead: int = 0  # lines of 128 bytes, of each row of its tile, that a program asks for before it waits
    splits: int = 1  # programs that share the columns of one tile


@dataclass(frozen=True)
class Parts:
    """A product [R, O] that is still to be joined: the sum of its float32 parts [S, R, O], in order, then rounded."""

    sums: Tensor
    dtype: torch.dtype
    width: int  # of the matrix


def _blocks(rows: int) -> int:
    """Tiles of 64 rows, as many as a power of 2: what is chosen by them changes where the warm-up looks."""
    return 1 << ((rows - 1) // 64).bit_length()


def _in_range(outs: int, width: int, rows: int) -> bool:
    return 2 <= rows <= MOST_ROWS and LEAST <= outs * width <= MOST


def shape_of(outs: int, width: int, rows: int, gated: bool = False) -> Shape | None:
    """The shape to multiply some rows with a matrix [O, I] in, or None where cuBLAS should."""
    if not _in_range(outs, width, rows) or width > MOST_WIDTH:
        return None
    blocks = _blocks(rows)
    if not gated:
        tiles = triton.cdiv(outs, 32)
        fit = tiles <= PROCESSORS and tiles * blocks <= 2 * PROCESSORS
        return Shape(64, 32, 128, 4, 4, 16 // blocks) if fit else None
    if rows <= 16 or rows > 128 or outs > 2 * 64 * PROCESSORS:
        return None
    many = outs // 2 >= 64 * PROCESSORS // 2  # tiles of 64 for half of the processors at least
    if rows <= 64:
        return Shape(64, 64, 64, 4, 6) if many else Shape(64, 32, 64, 4, 5)
    return Shape(128, 64, 64, 8, 5, 16) if many else Shape(128, 32, 64, 4, 4, 16)


def parts_shape_of(outs: int, width: int, rows: int) -> Shape | None:
    """The shape to leave a product in parts in, or None where that is not faster."""
    if not _in_range(outs, width, rows) or width <= 2 * outs:
        return None
    programs = PROCESSORS
    if rows <= 32:
        shape = Shape(64, 64, 128, 4, 4, 8)
    elif rows <= 64:
        shape, programs = Shape(64, 16, 128, 4, 4, 16), 2 * PROCESSORS
    elif rows <= 128:
        shape = Shape(128, 64, 128, 8, 4, 8)
    else:
        shape = Shape(64, 128, 64, 4, 4, 4)
    tiles = triton.cdiv(outs, shape.outs) * max(1, 64 * _blocks(rows) // shape.rows)
    turns = triton.cdiv(width, shape.columns)
    splits = min(programs // tiles, turns // 2, MOST_SPLITS)
    return shape._replace(splits=splits) if splits > 1 else None


@triton.jit
def _halves(acc, ROWS: tl.constexpr, OUTS: tl.constexpr):
    # [ROWS, 2 OUTS] to its halves of columns.
    return tl.split(tl.permute(tl.reshape(acc, [ROWS, 2, OUTS]), (0, 2, 1)))


@triton.jit(do_not_specialize=["rows", "blocks", "tiles", "turns", "splits"])
def _small_product(
    x_desc, weight_desc, weight_ptr, bias_ptr, out_ptr, rows, outs, width, blocks, tiles, turns, splits,
    ROWS: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    PARTS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    program = tl.program_id(0)
    block = program % blocks
    tile = program // blocks % tiles
    split = program // blocks // tiles
    begin = split * turns // splits
    end = (split + 1) * turns // splits
    if EARLY and AHEAD:
        column = begin * COLUMNS + block * (AHEAD * 64)  # programs of one tile ask for different lines
        soon = tile * OUTS + tl.arange(0, OUTS)
        _ask(weight_ptr, soon, column, outs, width, AHEAD)
        if GATE is not None:
            _ask(weight_ptr, outs + soon, column, 2 * outs, width, AHEAD)
    wait(EARLY)
    SIDES: tl.constexpr = 1 if GATE is None else 2
    acc = tl.zeros([ROWS, OUTS * SIDES], tl.float32)
    for step in tl.range(begin, end):
        x = x_desc.load([block * ROWS, step * COLUMNS])
        if GATE is None:
            weight = weight_desc.load([tile * OUTS, step * COLUMNS])
        else:  # [2, OUTS, COLUMNS]: both halves' rows
            weight = tl.reshape(weight_desc.load([0, tile * OUTS, step * COLUMNS]), [2 * OUTS, COLUMNS])
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="tf32x3")
    row = block * ROWS + tl.arange(0, ROWS)
    out = tile * OUTS + tl.arange(0, OUTS)
    if PARTS:
        at = (split * rows + row).to(tl.int64)[:, None] * outs + out[None, :]
        tl.store(out_ptr + at, acc, mask=(row < rows)[:, None] & (out < outs)[None, :])
    elif GATE is None:
        _put(out_ptr, bias_ptr, acc, acc, row, out, rows, outs, BIAS, GATE)
    else:
        first, second = _halves(acc, ROWS, OUTS)
        _put(out_ptr, bias_ptr, first, second, row, out, rows, outs, BIAS, GATE)


def product(
    x: Tensor,
    weight: Tensor,
    shape: Shape,
    bias: Tensor | None = None,
    gate: str | None = None,
    early: bool = False,
) -> Tensor:
    """[R, I] times [O, I] → [R, O], summed in float32; with `gate` [2 O, I], and act(first half) * second half."""
    if gate is not None:
        check_kind(gate)
    out = x.new_empty(len(x), len(weight) // (1 if gate is None else 2))
    _launch(x, weight, shape, out, bias, gate, early)
    return out


def parts(x: Tensor, weight: Tensor, shape: Shape, early: bool = False) -> Parts:
    """[R, I] times [O, I] → its parts [splits, R, O]."""
    sums = x.new_empty(shape.splits, len(x), len(weight), dtype=torch.float32)
    _launch(x, weight, shape, sums, None, None, early)
    return Parts(sums, x.dtype, x.shape[1])


def rehearsed_parts(like: Parts) -> list[Parts]:
    """Parts of the same matrix's products with other rows, in name only: one for each count of splits."""
    _, rows, outs = like.sums.shape
    shapes = (parts_shape_of(outs, like.width, count) for count in VARIANTS)
    splits = sorted({shape.splits for shape in shapes if shape is not None})
    return [Parts(like.sums.new_empty(count, rows, outs), like.dtype, like.width) for count in splits]


def _launch(
    x: Tensor, weight: Tensor, shape: Shape, out: Tensor, bias: Tensor | None, gate: str | None, early: bool
) -> None:
    rows, width = x.shape
    outs = out.shape[-1]
    blocks, tiles = triton.cdiv(rows, shape.rows), triton.cdiv(outs, shape.outs)
    launch(
        _small_product, (blocks * tiles * shape.splits,),
        described(x, shape.rows, shape.columns),
        described(weight, shape.outs, shape.columns) if gate is None else _both(weight, shape.outs, shape.columns),
        weight, out if bias is None else bias, out,
        rows, outs, width, blocks, tiles, triton.cdiv(width, shape.columns), shape.splits,
        ROWS=shape.rows, OUTS=shape.outs, COLUMNS=shape.columns, BIAS=bias is not None, GATE=gate,
        PARTS=out.ndim == 3, AHEAD=shape.ahead, EARLY=early,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(early),
    )  # fmt: skip


def _both(weight: Tensor, rows: int, columns: int) -> Any:
    """A matrix [2 O, I] for the engine that copies tiles: of the same rows of either half."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # of Triton 3.4 and later

    outs, width = len(weight) // 2, weight.shape[1]
    return TensorDescriptor(weight.view(2, outs, width), [2, outs, width], [outs * width, width, 1], [2, rows, columns])
