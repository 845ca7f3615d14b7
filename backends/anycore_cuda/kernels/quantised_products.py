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
    acc, out_ptr, part_ptr, scale_ptr, row_scale_ptr, bias_ptr, output, row, rows, unit, split, first,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # acc [outputs, rows] → the result, or, of outputs from `first` on, which are split, a part of it, unscaled.
    inside = (output < OUTPUTS)[:, None] & (row < rows)[None, :]
    if SPLITS > 1 and split >= 0:
        line = split.to(tl.int64) * rows + row
        place = line[None, :] * (OUTPUTS - first) + (output - first)[:, None]
        tl.store(part_ptr + place, acc.to(tl.float32), mask=inside)
    else:
        place = row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
        acc = acc.to(tl.float32) * unit
        if SCALED:
            acc *= tl.load(scale_ptr + output, mask=output < OUTPUTS, other=0.0)[:, None]
        if ROUNDS:
            acc *= tl.load(row_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _work(whole, TILE: tl.constexpr, SPLITS: tl.constexpr):
    # A program's tile, which split of it, or -1 if all of it, and the first output that is split: the last to start
    # are the smallest, so that all processors end at about the same time.
    tile = tl.program_id(1)
    split = -1
    if SPLITS > 1 and tile >= whole:
        split = (tile - whole) % SPLITS
        tile = whole + (tile - whole) // SPLITS
    return tile, split, whole * TILE


@triton.jit
def _turns_of(split, turns: tl.constexpr, SPLITS: tl.constexpr):
    # A split's turns.
    each: tl.constexpr = (turns + SPLITS - 1) // SPLITS
    first = tl.maximum(split, 0) * each
    return first, tl.where(split < 0, turns, tl.minimum(first + each, turns))


@triton.jit(do_not_specialize=["rows", "first"])
def _join(
    part_ptr, out_ptr, scale_ptr, row_scale_ptr, bias_ptr, rows, first, unit,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SCALED: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    output = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < OUTPUTS
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * rows + row) * (OUTPUTS - first) + output - first
        acc += tl.load(part_ptr + place, mask=inside, other=0.0)
    acc *= unit
    if SCALED:
        acc *= tl.load(scale_ptr + output, mask=inside, other=0.0)
    if ROUNDS:
        acc *= tl.load(row_scale_ptr + row)
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUTPUTS + output, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "whole"])
def _byte_product(
    x_ptr, data_ptr, scale_ptr, row_scale_ptr, bias_ptr, out_ptr, part_ptr, rows, unit, whole,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, BIAS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile, split, split_from = _work(whole, TILE, SPLITS)
    output = tile * TILE + tl.arange(0, TILE)
    at = tl.arange(0, TURN)
    turns: tl.constexpr = (COLUMNS + TURN - 1) // TURN
    known = output < OUTPUTS
    data_at = data_ptr + output.to(tl.int64)[:, None] * COLUMNS
    x_at = x_ptr + row.to(tl.int64)[None, :] * COLUMNS
    sums: tl.constexpr = tl.int32 if ROUNDS and KIND == "int8" else tl.float32
    acc = tl.zeros([TILE, ROWS], sums)
    first, last = _turns_of(split, turns, SPLITS)
    for turn in range(first, last):
        column = turn * TURN + at
        inside = column < COLUMNS
        numbers = tl.load(data_at + column[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at + column[:, None], mask=(row < rows)[None, :] & inside[:, None], other=0.0)
        if not ROUNDS:
            numbers = bytes_to_float(numbers, KIND).to(x.dtype)
        acc = tl.dot(numbers, x, acc, out_dtype=sums)
    _write(
        acc, out_ptr, part_ptr, scale_ptr, row_scale_ptr, bias_ptr, output, row, rows, unit, split, split_from,
        OUTPUTS, SPLITS, True, ROUNDS, BIAS,
    )  # fmt: skip


@triton.jit
def _columns_of(x_ptr, row, column, rows, COLUMNS: tl.constexpr):
    # Some columns of rows, as the right factor.
    x_at = x_ptr + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
    return tl.load(x_at, mask=(row < rows)[None, :] & (column < COLUMNS)[:, None], other=0.0)


@triton.jit
def _plane(words, scale, offset, PLANE: tl.constexpr, dtype: tl.constexpr):
    numbers, origin = nibble(words, PLANE)
    return (numbers * scale - (origin * scale + offset)).to(dtype)


@triton.jit
def _half(words, scale, offset, HALF: tl.constexpr, TILE: tl.constexpr, dtype: tl.constexpr):
    even = tl.join(_plane(words, scale, offset, 4 * HALF, dtype), _plane(words, scale, offset, 4 * HALF + 2, dtype))
    odd = tl.join(_plane(words, scale, offset, 4 * HALF + 1, dtype), _plane(words, scale, offset, 4 * HALF + 3, dtype))
    return tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 3, 1]), [TILE, 64])


@triton.jit
def widened(words, low, high, TILE: tl.constexpr, dtype: tl.constexpr):
    """Words [TILE, 16] → their numbers [TILE, 128], plane by plane, under the scales and offsets of either half.

    One product of all of them runs while the next are widened, where products of single planes would be waited for.
    """
    first, first_offset = pair_of(low)
    second, second_offset = pair_of(high)
    first = _half(words, first, first_offset, 0, TILE, dtype)
    second = _half(words, second, second_offset, 1, TILE, dtype)
    return tl.reshape(tl.permute(tl.join(first, second), [0, 2, 1]), [TILE, 128])


@triton.jit(do_not_specialize=["rows", "whole"])
def _nibble_product(
    x_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, rows, unit, whole,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, MORE: tl.constexpr,
    TURN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # A turn is all planes of 16 words, 128 columns, once or twice.
    RUN: tl.constexpr = 128 if WIDTH == 16 else WIDTH  # of columns that lie side by side
    row = tl.program_id(0) * (ROWS + MORE) + tl.arange(0, ROWS)
    tile, split, split_from = _work(whole, TILE, SPLITS)
    output = tile * TILE + tl.arange(0, TILE)
    turns: tl.constexpr = (WORDS * 8 + TURN - 1) // TURN
    known = output < OUTPUTS
    data_at = data_ptr + output.to(tl.int64)[:, None] * WORDS
    pairs_at = scale_ptr.to(tl.pointer_type(tl.int32)) + output.to(tl.int64)[:, None] * GROUPS
    acc = tl.zeros([TILE, ROWS], tl.float32)
    if MORE:
        more_row = tl.program_id(0) * (ROWS + MORE) + ROWS + tl.arange(0, MORE)
        more = tl.zeros([TILE, MORE], tl.float32)
    first, last = _turns_of(split, turns, SPLITS)
    for turn in range(first, last):
        for piece in tl.static_range(TURN // 128):
            start = turn * (TURN // 8) + piece * 16
            word = start + tl.arange(0, 16)
            there = known[:, None] & (word < WORDS)[None, :]
            words = tl.load(data_at + word[None, :], mask=there, other=0)
            if WIDTH == 16:  # a half is of one group
                low = tl.load(pairs_at + tl.minimum(start * 8 // GROUP, GROUPS - 1), mask=known[:, None], other=0)
                high = low
                if GROUPS > 1 and GROUP % 128:
                    group = tl.minimum((start * 8 + 64) // GROUP, GROUPS - 1)
                    high = tl.load(pairs_at + group, mask=known[:, None], other=0)
            else:
                column = word // WIDTH * (8 * WIDTH) + word % WIDTH
                group = tl.minimum(column // GROUP, GROUPS - 1)[None, :]
                low = tl.load(pairs_at + group, mask=there, other=0)
                group = tl.minimum((column + 4 * WIDTH) // GROUP, GROUPS - 1)[None, :]
                high = tl.load(pairs_at + group, mask=there, other=0)
            numbers = widened(words, low, high, TILE, x_ptr.dtype.element_ty)
            place = tl.arange(0, 128)
            of = start + place % 16
            column = of // WIDTH * (8 * WIDTH) + place // 16 * WIDTH + of % WIDTH
            column = tl.max_contiguous(tl.multiple_of(column, RUN), RUN)  # which the compiler does not see
            acc = tl.dot(numbers, _columns_of(x_ptr, row, column, rows, COLUMNS), acc)
            if MORE:
                more = tl.dot(numbers, _columns_of(x_ptr, more_row, column, rows, COLUMNS), more)
    _write(
        acc, out_ptr, part_ptr, scale_ptr, scale_ptr, bias_ptr, output, row, rows, unit, split, split_from,
        OUTPUTS, SPLITS, False, False, BIAS,
    )  # fmt: skip
    if MORE:
        _write(
            more, out_ptr, part_ptr, scale_ptr, scale_ptr, bias_ptr, output, more_row, rows, unit, split, split_from,
            OUTPUTS, SPLITS, False, False, BIAS,
        )  # fmt: skip


def join(
    parts: Tensor, out: Tensor, weight: Packed, row_scale: Tensor | None, bias: Tensor | None, early: bool = False
) -> None:
    """Add up [S, R, N], parts of a product's last N outputs, and put them into it [R, O], scaled and with the bias."""
    splits, rows, last = parts.shape
    outputs = out.shape[1]
    block = 1024 if rows > 1 else 256
    launch(
        _join, (rows, triton.cdiv(last, block)), parts, out, weight.scale,
        weight.scale if row_scale is None else row_scale, weight.scale if bias is None else bias, rows, outputs - last,
        weight.unit,
        OUTPUTS=outputs, SPLITS=splits, SCALED=weight.group == 0, ROUNDS=weight.rounds, BIAS=bias is not None,
        BLOCK=block, EARLY=early, num_warps=4, **launch_options(early),
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
    tiles = triton.cdiv(outputs, shape.outputs)
    whole = min(tiles, shape.whole) if shape.splits > 1 else tiles
    rest = max(0, outputs - whole * shape.outputs)  # outputs that are summed in parts
    parts = torch.empty(shape.splits, rows, rest, dtype=torch.float32, device=x.device) if rest else out
    scales = weight.scale if row_scale is None else row_scale
    added = weight.scale if bias is None else bias
    grid = (triton.cdiv(rows, shape.rows + shape.more), whole + (tiles - whole) * shape.splits)
    same = {
        "OUTPUTS": outputs, "COLUMNS": columns, "BIAS": bias is not None,
        "TILE": shape.outputs, "ROWS": shape.rows, "SPLITS": shape.splits if rest else 1,
        "num_warps": shape.warps, "num_stages": shape.stages,
    }  # fmt: skip
    if weight.kind == "int4":
        launch(
            _nibble_product, grid, x, weight.data, weight.scale, added, out, parts, rows, weight.unit, whole,
            WORDS=weight.data.shape[1], WIDTH=weight.width, GROUP=weight.group, GROUPS=weight.groups, MORE=shape.more,
            TURN=shape.columns, **same,
        )  # fmt: skip
    else:
        # With its own type, so that tiles go to the tensor cores as they lie in memory.
        data = weight.data.view(x.dtype) if weight.rounds else weight.data
        launch(
            _byte_product, grid, x, data, weight.scale, scales, added, out, parts, rows, weight.unit, whole,
            KIND=weight.kind, ROUNDS=weight.rounds, TURN=shape.columns, **same,
        )  # fmt: skip
    if rest:
        join(parts, out, weight, row_scale, bias, early)
    return out
