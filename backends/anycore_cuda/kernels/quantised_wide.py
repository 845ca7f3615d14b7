"""4-bit matrices times 65 to 256 rows: the copy engine brings tiles, and a block of the matrix is 128 columns.

Between the L2 cache and the processors there is little room, and rows are most of what passes: tiles of the matrix are
large, or two smaller ones share the rows that are there, and while one is multiplied the other is widened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.products import described
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_products import _turns_of, _work, _write, join, widened
from anycore_cuda.kernels.quantised_shapes import LARGE

KNOWN = find_spec("triton.tools.tensor_descriptor") is not None
"""Triton tells tiles to the copy engine, from 3.4 on."""
WIDE_ROWS = 256
"""So many rows at most; of more, making the matrix dense first is no slower."""


@dataclass(frozen=True, slots=True)
class Wide:
    """Of a program: rows in two counts, which are powers of two (the second may be 0), outputs of a tile and how many
    tiles share the rows, warps, stages of the pipeline, and how many programs a processor has room for.
    """

    rows: int
    more: int
    outputs: int
    tiles: int
    warps: int
    stages: int
    programs: int = 1


WIDE = (
    (96, Wide(64, 32, 128, 1, 8, 5)),
    (128, Wide(128, 0, 64, 2, 4, 2, 2)),
    (144, Wide(128, 16, 64, 2, 4, 2, 2)),
    (160, Wide(128, 32, 128, 1, 8, 4)),
    (192, Wide(128, 64, 128, 1, 8, 4)),
    (256, Wide(256, 0, 128, 1, 8, 3)),
)
"""Up to so many rows, as measured to be fast on an H200."""
FEW_TILES = {128: Wide(128, 0, 128, 1, 8, 4), 144: Wide(128, 16, 128, 1, 8, 4)}
"""The same of matrices that are not `LARGE`, which programs of two tiles split into too many parts."""


def fits(x: Tensor, weight: Packed) -> bool:
    """Whether the copy engine can bring tiles of both."""
    whole = weight.kind == "int4" and weight.width == 16 and weight.columns % 8 == 0
    aligned = x.data_ptr() % 16 == 0 or not x.is_contiguous()  # what has to be copied first will be
    return KNOWN and whole and x.element_size() == 2 and aligned


def wide_of(weight: Packed, rows: int) -> Wide:
    most, shape = next(((most, shape) for most, shape in WIDE if rows <= most), WIDE[-1])
    return shape if math.prod(weight.shape) >= LARGE else FEW_TILES.get(most, shape)


@triton.jit
def _add(
    acc, more, words, x, others, scale_ptr, output, column,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    # A tile's sums with the products of a block.
    at = scale_ptr.to(tl.pointer_type(tl.int32)) + output * GROUPS
    known = output < OUTPUTS
    low = tl.load(at + tl.minimum(column // GROUP, GROUPS - 1), mask=known, other=0)[:, None]
    high = low
    if GROUPS > 1 and GROUP % 128:
        high = tl.load(at + tl.minimum((column + 64) // GROUP, GROUPS - 1), mask=known, other=0)[:, None]
    numbers = widened(words, low, high, TILE, x.dtype)
    # Few rows first: then large products are under way while the next numbers are widened.
    if MORE and MORE < 64:
        more = tl.dot(numbers, tl.trans(others), more)
    acc = tl.dot(numbers, tl.trans(x), acc)
    if MORE >= 64:
        more = tl.dot(numbers, tl.trans(others), more)
    return acc, more


@triton.jit(do_not_specialize=["rows", "whole"])
def _wide_product(
    x_desc, more_desc, data_desc, scale_ptr, bias_ptr, out_ptr, part_ptr, rows, unit, whole,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0) * (ROWS + MORE)
    tile, split, split_from = _work(whole, TILE * TILES, SPLITS)
    start = tile * (TILE * TILES)
    output = start + tl.arange(0, TILE)
    first, last = _turns_of(split, WORDS // 16, SPLITS)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    more = tl.zeros([TILE, MORE if MORE else 16], tl.float32)
    other_acc = acc
    other_more = more
    wait(EARLY)
    for turn in tl.range(first, last):
        column = turn * 128
        words = data_desc.load([start, turn * 16])
        x = x_desc.load([row, column])
        others = more_desc.load([row + ROWS, column]) if MORE else x
        acc, more = _add(acc, more, words, x, others, scale_ptr, output, column, OUTPUTS, GROUP, GROUPS, TILE, MORE)
        if TILES == 2:
            words = data_desc.load([start + TILE, turn * 16])
            other_acc, other_more = _add(
                other_acc, other_more, words, x, others, scale_ptr, output + TILE, column,
                OUTPUTS, GROUP, GROUPS, TILE, MORE,
            )  # fmt: skip
    place = row + tl.arange(0, ROWS)
    more_place = row + ROWS + tl.arange(0, MORE if MORE else 16)
    for at in tl.static_range(TILES):
        _write(
            other_acc if at else acc, out_ptr, part_ptr, scale_ptr, scale_ptr, bias_ptr, output + at * TILE, place,
            rows, unit, split, split_from, OUTPUTS, SPLITS, False, False, BIAS,
        )  # fmt: skip
        if MORE:
            _write(
                other_more if at else more, out_ptr, part_ptr, scale_ptr, scale_ptr, bias_ptr, output + at * TILE,
                more_place, rows, unit, split, split_from, OUTPUTS, SPLITS, False, False, BIAS,
            )  # fmt: skip


def cut(weight: Packed, rows: int, shape: Wide, processors: int) -> tuple[int, int]:
    """How many programs' outputs come whole, first, and in how many parts the columns of all others are split: as many
    whole ones as keep all processors busy, and no part without a turn.
    """
    at_a_time = max(1, processors * shape.programs // -(-rows // (shape.rows + shape.more)))
    whole, rest = divmod(-(-weight.shape[0] // (shape.outputs * shape.tiles)), at_a_time)
    turns = weight.data.shape[1] // 16
    most = max(1, min(16, at_a_time // max(1, rest), turns // 3))
    return whole * at_a_time, -(-turns // -(-turns // most))


def wide_product(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    processors: int,
    shape: Wide | None = None,
    early: bool = False,
) -> Tensor:
    """[R, I] times [O, I] → [R, O], where `fits`."""
    x = x.contiguous()
    outputs, rows = weight.shape[0], len(x)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    shape = shape or wide_of(weight, rows)
    whole, splits = cut(weight, rows, shape, processors)
    each = shape.outputs * shape.tiles
    tiles = triton.cdiv(outputs, each)
    whole = min(tiles, whole) if splits > 1 else tiles
    rest = max(0, outputs - whole * each)  # outputs that are summed in parts
    parts = torch.empty(splits, rows, rest, dtype=torch.float32, device=x.device) if rest else out
    descriptors: tuple[Any, ...] = (
        described(x, shape.rows, 128), described(x, shape.more or 16, 128), described(weight.data, shape.outputs, 16)
    )  # fmt: skip
    launch(
        _wide_product, (triton.cdiv(rows, shape.rows + shape.more), whole + (tiles - whole) * splits),
        *descriptors, weight.scale, weight.scale if bias is None else bias, out, parts, rows, weight.unit, whole,
        OUTPUTS=outputs, WORDS=weight.data.shape[1], GROUP=weight.group, GROUPS=weight.groups, BIAS=bias is not None,
        TILE=shape.outputs, TILES=shape.tiles, ROWS=shape.rows, MORE=shape.more, SPLITS=splits if rest else 1,
        EARLY=early, num_warps=shape.warps, num_stages=shape.stages, **launch_options(early),
    )  # fmt: skip
    if rest:
        join(parts, out, weight, None, bias, early)
    return out
