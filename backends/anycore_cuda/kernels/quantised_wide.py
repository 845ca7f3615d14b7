"""4-bit matrices times 65 to 256 rows: the copy engine brings tiles, and two of outputs share the rows that are there.

Between the L2 cache and the processors there is little room, and rows are most of what passes: two tiles of outputs a
program halve that, and while one is multiplied the other is widened. Only for blocks of planes of 32 columns, of which
a turn's columns lie side by side in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.products import described
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import pair_of
from anycore_cuda.kernels.quantised_products import _half, _turns_of, _work, _write, join

TILE = 128
"""Outputs of a tile."""


@dataclass(frozen=True, slots=True)
class Wide:
    """Of a program: rows in two counts, which are powers of two (the second may be 0), how many tiles of outputs share
    them, columns a turn (128 or 256), warps and stages of the pipeline.
    """

    rows: int
    more: int
    tiles: int
    columns: int = 128
    warps: int = 8
    stages: int = 3


def fits(x: Tensor, weight: Packed) -> bool:
    """Whether the copy engine can bring tiles of both."""
    whole = weight.kind == "int4" and weight.width == 32 and weight.data.shape[1] % 32 == 0
    return whole and x.element_size() == 2 and x.shape[1] == weight.columns and weight.columns % 8 == 0


@triton.jit
def _scales(scale_ptr, output, column, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    at = scale_ptr.to(tl.pointer_type(tl.int32)) + (output * GROUPS + tl.minimum(column // GROUP, GROUPS - 1))
    return pair_of(tl.load(at, mask=output < OUTPUTS, other=0)[:, None])


@triton.jit
def _add(
    acc, more, words, x, others, scale_ptr, output, column, LOWEST: tl.constexpr, HALVES: tl.constexpr,
    OUTPUTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    # A tile's sums with the products of one half of its words, or of both side by side.
    scale, offset = _scales(scale_ptr, output, column, OUTPUTS, GROUP, GROUPS)
    numbers = _half(words, scale, offset, LOWEST, TILE, x.dtype)
    if HALVES == 2:
        scale, offset = _scales(scale_ptr, output, column + 128, OUTPUTS, GROUP, GROUPS)
        second = _half(words, scale, offset, 1, TILE, x.dtype)
        numbers = tl.reshape(tl.permute(tl.join(numbers, second), [0, 2, 1]), [TILE, 256])
    # The few rows first: then large products are under way while the next numbers are widened.
    if MORE:
        more = tl.dot(numbers, tl.trans(others), more)
    return tl.dot(numbers, tl.trans(x), acc), more


@triton.jit(do_not_specialize=["rows", "whole"])
def _wide_product(
    x_desc, more_desc, data_desc, scale_ptr, bias_ptr, out_ptr, part_ptr, rows, unit, whole,
    OUTPUTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr, HALVES: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0) * (ROWS + MORE)
    tile, split, split_from = _work(whole, TILE * TILES, SPLITS)
    start = tile * (TILE * TILES)
    output = start + tl.arange(0, TILE)
    first, last = _turns_of(split, WORDS // 32, SPLITS)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    more = tl.zeros([TILE, MORE if MORE else 16], tl.float32)
    other_acc = acc
    other_more = more
    wait(EARLY)
    for lowest in tl.static_range(0, 2, HALVES):
        for turn in tl.range(first, last):
            column = turn * 256 + lowest * 128
            words = data_desc.load([start, turn * 32])
            x = x_desc.load([row, column])
            others = more_desc.load([row + ROWS, column]) if MORE else x
            acc, more = _add(
                acc, more, words, x, others, scale_ptr, output, column, lowest, HALVES,
                OUTPUTS, GROUP, GROUPS, TILE, MORE,
            )  # fmt: skip
            if TILES == 2:
                words = data_desc.load([start + TILE, turn * 32])
                other_acc, other_more = _add(
                    other_acc, other_more, words, x, others, scale_ptr, output + TILE, column, lowest, HALVES,
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
    at_a_time = max(1, processors // -(-rows // (shape.rows + shape.more)))
    whole, rest = divmod(-(-weight.shape[0] // (TILE * shape.tiles)), at_a_time)
    turns = weight.data.shape[1] // 32
    most = max(1, min(16, at_a_time // max(1, rest), turns // 2))
    return whole * at_a_time, -(-turns // -(-turns // most))


def wide_product(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    processors: int,
    shape: Wide,
    early: bool = False,
) -> Tensor:
    """[R, I] times [O, I] → [R, O], where `fits`."""
    x = x.contiguous()
    outputs, rows = weight.shape[0], len(x)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return out
    whole, splits = cut(weight, rows, shape, processors)
    each = TILE * shape.tiles
    tiles = triton.cdiv(outputs, each)
    whole = min(tiles, whole) if splits > 1 else tiles
    rest = max(0, outputs - whole * each)  # outputs that are summed in parts
    parts = torch.empty(splits, rows, rest, dtype=torch.float32, device=x.device) if rest else out
    descriptors: tuple[Any, ...] = (
        described(x, shape.rows, shape.columns),
        described(x, shape.more or 16, shape.columns),
        described(weight.data, TILE, 32),
    )
    launch(
        _wide_product, (triton.cdiv(rows, shape.rows + shape.more), whole + (tiles - whole) * splits),
        *descriptors, weight.scale, weight.scale if bias is None else bias, out, parts, rows, weight.unit, whole,
        OUTPUTS=outputs, WORDS=weight.data.shape[1], GROUP=weight.group, GROUPS=weight.groups, BIAS=bias is not None,
        TILE=TILE, TILES=shape.tiles, ROWS=shape.rows, MORE=shape.more, HALVES=shape.columns // 128,
        SPLITS=splits if rest else 1, EARLY=early,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(early),
    )  # fmt: skip
    if rest:
        join(parts, out, weight, None, bias, early)
    return out
