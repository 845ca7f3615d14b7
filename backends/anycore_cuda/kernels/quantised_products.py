"""Quantised matrices times several rows, on tensor cores: tiles are read as they are and widened in registers, or,
where rows are rounded as the matrix is, multiplied as they are.

The matrix is the left factor, which may be the larger one: few rows then cost no more than reading it. Where its
tiles are fewer than the processors, their columns are split, and another kernel adds the parts up, always alike.
Groups of int8 are not multiplied here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import bytes_to_float, nibble, pair_of
from anycore_cuda.kernels.quantised_shapes import SHARED, Shape, shape_of


@triton.jit
def _write(
    acc, out_ptr, scale_ptr, row_scale_ptr, bias_ptr, output, row, rows, unit,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # acc [outputs, rows] → the result, or its part of it, unscaled.
    inside = (output < OUTPUTS)[:, None] & (row < rows)[None, :]
    place = row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    if SPLITS > 1:
        part = tl.program_id(2).to(tl.int64) * rows * OUTPUTS
        tl.store(out_ptr + part + place, acc.to(tl.float32), mask=inside)
    else:
        acc = acc.to(tl.float32) * unit
        if SCALED:
            acc *= tl.load(scale_ptr + output, mask=output < OUTPUTS, other=0.0)[:, None]
        if ROUNDS:
            acc *= tl.load(row_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "stride"])
def _join(
    part_ptr, out_ptr, scale_ptr, row_scale_ptr, bias_ptr, rows, unit,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < OUTPUTS
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(part_ptr + (split * rows + row) * OUTPUTS + output, mask=inside, other=0.0)
    acc *= unit
    if SCALED:
        acc *= tl.load(scale_ptr + output, mask=inside, other=0.0)
    if ROUNDS:
        acc *= tl.load(row_scale_ptr + row)
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUTPUTS + output, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _byte_product(
    x_ptr, data_ptr, scale_ptr, row_scale_ptr, bias_ptr, out_ptr, rows, unit,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = tl.arange(0, TURN)
    turns: tl.constexpr = (COLUMNS + TURN - 1) // TURN
    each: tl.constexpr = (turns + SPLITS - 1) // SPLITS
    known = output < OUTPUTS
    data_at = data_ptr + output.to(tl.int64)[:, None] * COLUMNS
    x_at = x_ptr + row.to(tl.int64)[None, :] * COLUMNS
    sums: tl.constexpr = tl.int32 if ROUNDS and KIND == "int8" else tl.float32
    acc = tl.zeros([TILE, ROWS], sums)
    first = tl.program_id(2) * each
    for turn in range(first, tl.minimum(first + each, turns)):
        column = turn * TURN + at
        inside = column < COLUMNS
        tile = tl.load(data_at + column[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at + column[:, None], mask=(row < rows)[None, :] & inside[:, None], other=0.0)
        if not ROUNDS:
            tile = bytes_to_float(tile, KIND).to(x.dtype)
        acc = tl.dot(tile, x, acc, out_dtype=sums)
    _write(
        acc, out_ptr, scale_ptr, row_scale_ptr, bias_ptr, output, row, rows, unit, OUTPUTS, SPLITS, True, ROUNDS, BIAS
    )


@triton.jit
def _columns_of(x_ptr, row, at, inside, rows, COLUMNS: tl.constexpr):
    # Some columns of rows, as the right factor.
    x_at = x_ptr + row.to(tl.int64)[None, :] * COLUMNS + at[:, None]
    return tl.load(x_at, mask=(row < rows)[None, :] & inside[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _nibble_product(
    x_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, rows, unit,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
    TURN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # A turn is all planes of 32 words, or four: then the other four follow when all turns are done, so that less is
    # under way at a time. The words are still in the cache then.
    PLANES: tl.constexpr = TURN // 32
    row = tl.program_id(0) * (ROWS + MORE) + tl.arange(0, ROWS)
    output = tl.program_id(1) * TILE + tl.arange(0, TILE)
    turns: tl.constexpr = (WORDS + 31) // 32
    each: tl.constexpr = (turns + SPLITS - 1) // SPLITS
    known = output < OUTPUTS
    data_at = data_ptr + output.to(tl.int64)[:, None] * WORDS
    pairs_at = scale_ptr.to(tl.pointer_type(tl.int32)) + output.to(tl.int64)[:, None] * GROUPS
    acc = tl.zeros([TILE, ROWS], tl.float32)
    if MORE:
        more_row = tl.program_id(0) * (ROWS + MORE) + ROWS + tl.arange(0, MORE)
        more = tl.zeros([TILE, MORE], tl.float32)
    start = tl.program_id(2) * each
    for lowest in tl.static_range(0, 8, PLANES):
        for turn in range(start, tl.minimum(start + each, turns)):
            word = turn * 32 + tl.arange(0, 32)
            there = known[:, None] & (word < WORDS)[None, :]
            words = tl.load(data_at + word[None, :], mask=there, other=0)
            first = word // WIDTH * (8 * WIDTH) + word % WIDTH  # a word's column in the first plane
            for plane in tl.static_range(lowest, lowest + PLANES):
                if plane % 4 == 0:
                    if WIDTH == 32:  # all of a turn are of one group
                        group = tl.minimum((turn * 256 + plane * 32) // GROUP, GROUPS - 1)
                        scale, offset = pair_of(tl.load(pairs_at + group, mask=known[:, None], other=0))
                    else:
                        group = tl.minimum((first + plane * WIDTH) // GROUP, GROUPS - 1)
                        scale, offset = pair_of(tl.load(pairs_at + group[None, :], mask=there, other=0))
                at = first + plane * WIDTH
                inside = (word < WORDS) & (at < COLUMNS)
                numbers, origin = nibble(words, plane)
                tile = (numbers * scale - (origin * scale + offset)).to(x_ptr.dtype.element_ty)
                acc = tl.dot(tile, _columns_of(x_ptr, row, at, inside, rows, COLUMNS), acc)
                if MORE:
                    more = tl.dot(tile, _columns_of(x_ptr, more_row, at, inside, rows, COLUMNS), more)
    _write(acc, out_ptr, scale_ptr, scale_ptr, bias_ptr, output, row, rows, unit, OUTPUTS, SPLITS, False, False, BIAS)
    if MORE:
        _write(
            more, out_ptr, scale_ptr, scale_ptr, bias_ptr, output, more_row, rows, unit,
            OUTPUTS, SPLITS, False, False, BIAS,
        )  # fmt: skip


def product(
    x: Tensor,
    weight: Packed,
    row_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    processors: int,
    shape: Shape | None = None,
    early: bool = False,
    shared: int = SHARED,
) -> Tensor:
    """[R, I], rounded where the weight says so with scales [R], times [O, I] → [R, O]."""
    x = x.contiguous()
    outputs, columns = weight.shape
    rows = len(x)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return out
    shape = shape or shape_of(weight, rows, processors, shared)
    split = shape.splits > 1
    parts = torch.empty(shape.splits, rows, outputs, dtype=torch.float32, device=x.device) if split else out
    scales = weight.scale if row_scale is None else row_scale
    added = weight.scale if bias is None else bias
    grid = (triton.cdiv(rows, shape.rows + shape.more), triton.cdiv(outputs, shape.outputs), shape.splits)
    same = {
        "OUTPUTS": outputs, "COLUMNS": columns, "BIAS": bias is not None,
        "TILE": shape.outputs, "ROWS": shape.rows, "SPLITS": shape.splits,
        "num_warps": shape.warps, "num_stages": shape.stages,
    }  # fmt: skip
    if weight.kind == "int4":
        launch(
            _nibble_product, grid, x, weight.data, weight.scale, added, parts, rows, weight.unit,
            WORDS=weight.data.shape[1], WIDTH=weight.width, GROUP=weight.group, GROUPS=weight.groups, MORE=shape.more,
            TURN=shape.columns, **same,
        )  # fmt: skip
    else:
        # With its own type, so that tiles go to the tensor cores as they lie in memory.
        data = weight.data.view(x.dtype) if weight.rounds else weight.data
        launch(
            _byte_product, grid, x, data, weight.scale, scales, added, parts, rows, weight.unit,
            KIND=weight.kind, ROUNDS=weight.rounds, TURN=shape.columns, **same,
        )  # fmt: skip
    if split:
        launch(
            _join, (rows, triton.cdiv(outputs, 1024)), parts, out, weight.scale, scales, added, rows, weight.unit,
            OUTPUTS=outputs, SPLITS=shape.splits, SCALED=weight.group == 0, ROUNDS=weight.rounds, BIAS=bias is not None,
            BLOCK=1024, EARLY=early, num_warps=4, **launch_options(early),
        )  # fmt: skip
    return out
