"""A 4-bit matrix times one vector in fixed point: nothing but reading the matrix, as few instructions as that takes.

A thread reads four words, 32 numbers, of several rows, and the bytes of the vector that belong to them once. Products
of four at a time are summed as integers; a group's scale and offset are applied to its sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.bytes_of_words import dot4
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.matvec import rows_of, store_row
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_rows import Fixed


@triton.jit
def _pairs(
    scale_ptr, row, start, known, VECTORS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    # Scales and offsets, in turn, of the four planes that either half of the words of a turn's vectors is of.
    at = tl.arange(0, TURN * 4)
    vector = start + at // 4
    column = vector * 4 // WIDTH * (8 * WIDTH) + at // 2 % 2 * 4 * WIDTH
    group = tl.minimum(column // GROUP, GROUPS - 1)
    inside = known[:, None] & (vector < VECTORS)[None, :]
    place = row[:, None] * (GROUPS * 2) + (group * 2 + at % 2)[None, :]
    if GROUP == 4 * WIDTH and GROUPS % 2 == 0:  # both halves' groups are neighbours, which the compiler does not see
        place = tl.max_contiguous(tl.multiple_of(place, [1, 4]), [1, 4])
    return tl.load(scale_ptr + place, mask=inside, other=0.0)


@triton.jit
def _four(words, ROWS: tl.constexpr, TURN: tl.constexpr):
    # [ROWS, TURN * 4] → each vector's four words, [ROWS, TURN]: what a thread has anyway.
    even, odd = tl.split(tl.reshape(words, [ROWS, TURN, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _bytes(x_at, turn, WORDS: tl.constexpr, TURN: tl.constexpr):
    # The vector's bytes that one half of a turn's words is multiplied with: upper ones, then lower ones.
    word = turn * (TURN * 4) + tl.arange(0, TURN * 4)
    a, b, c, d = _four(tl.load(x_at + word, mask=word < WORDS, other=0)[None, :], 1, TURN)
    e, f, g, h = _four(tl.load(x_at + 2 * WORDS + word, mask=word < WORDS, other=0)[None, :], 1, TURN)
    return a, b, c, d, e, f, g, h


@triton.jit
def _half(
    acc, a, b, c, d, scale, offset, x_at, turn, unit, total,
    MASK: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    # The sums, and the products of one half of a turn's words, under their scales and offsets.
    a, b, c, d = a & MASK, b & MASK, c & MASK, d & MASK
    e, f, g, h, i, j, k, m = _bytes(x_at, turn, WORDS, TURN)
    sums = tl.zeros([ROWS, TURN], tl.int32)
    sums = dot4(d, h, dot4(c, g, dot4(b, f, dot4(a, e, sums, False), False), False), False) * 256
    sums = dot4(d, m, dot4(c, k, dot4(b, j, dot4(a, i, sums, False), False), False), False)
    acc += scale.to(tl.float32) * (sums.to(tl.float32) * unit[None, :])
    return acc - offset.to(tl.float32) * total[None, :]


@triton.jit
def _read(
    data_ptr, scale_ptr, rows, tile, turn,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    TURN: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    # The words of one turn of a tile's rows, and the scales and offsets of either half of them.
    row, known = rows_of(tile, rows, ROWS, GATE)
    # Two-dimensional and with whole runs in memory, then reshaped: threads keep four words each, neighbours in a row.
    at = turn * (TURN * 4) + tl.arange(0, TURN * 4)
    inside = known[:, None] & (at < VECTORS * 4)[None, :]
    # 32 bits are enough for the places: a matrix has fewer words than that.
    flat = tl.load(data_ptr + row[:, None] * (VECTORS * 4) + at[None, :], mask=inside, other=0)
    return flat, _pairs(scale_ptr, row, turn * TURN, known, VECTORS, WIDTH, GROUP, GROUPS, TURN)


@triton.jit(do_not_specialize=["rows"])
def _nibble_matvec(
    x_ptr, unit_ptr, sum_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, rows, unit,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    TURN: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    TURNS: tl.constexpr = (VECTORS + TURN - 1) // TURN
    WORDS: tl.constexpr = VECTORS * 4
    vector = tl.arange(0, TURN)
    programs = tl.num_programs(0)
    tiles = (rows + ROWS - 1) // ROWS
    mine = (tiles - tl.program_id(0) + programs - 1) // programs
    # The weights of the next turn, of whichever tile, are always on their way: the first before the vector is there.
    flat, pairs = _read(data_ptr, scale_ptr, rows, tl.program_id(0), 0, VECTORS, WIDTH, GROUP, GROUPS, ROWS, TURN, GATE)
    wait(EARLY)

    acc = tl.zeros([ROWS, TURN], tl.float32)
    for step in range(mine * TURNS):
        turn = step % TURNS
        a, b, c, d = _four(flat, ROWS, TURN)
        scale, offset = tl.split(tl.reshape(pairs, [ROWS, TURN, 2, 2]))
        scale_first, scale_second = tl.split(scale)
        offset_first, offset_second = tl.split(offset)
        tile = tl.program_id(0) + (step + 1) // TURNS * programs
        flat, pairs = _read(
            data_ptr, scale_ptr, rows, tile, (step + 1) % TURNS, VECTORS, WIDTH, GROUP, GROUPS, ROWS, TURN, GATE
        )
        here = turn * TURN + vector
        x_unit = tl.load(unit_ptr + here // 8, mask=here < VECTORS, other=0.0)
        sum_first = tl.load(sum_ptr + here, mask=here < VECTORS, other=0.0)
        sum_second = tl.load(sum_ptr + VECTORS + here, mask=here < VECTORS, other=0.0)
        # The second half's numbers are left where they are in a byte, and so 16 times as large.
        low: tl.constexpr = 0x0F0F0F0F
        high: tl.constexpr = -0x0F0F0F10
        acc = _half(acc, a, b, c, d, scale_first, offset_first, x_ptr, turn, x_unit, sum_first, low, WORDS, ROWS, TURN)
        acc = _half(
            acc, a, b, c, d, scale_second, offset_second, x_ptr + WORDS, turn, x_unit / 16, sum_second, high,
            WORDS, ROWS, TURN,
        )  # fmt: skip
        if turn == TURNS - 1:
            done = tl.program_id(0) + step // TURNS * programs
            store_row(tl.sum(acc, axis=1) * unit, done, bias_ptr, out_ptr, rows, ROWS, BIAS, GATE)
            acc = tl.zeros([ROWS, TURN], tl.float32)


def shape_of(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Rows and vectors of 32 numbers a turn, and warps of a program, 16 bytes a thread and row; and how many programs
    a processor runs at a time: as measured to be fast on an H200 (ci/bench/h200).
    """
    if rows >= 1 << 16:  # a vocabulary's
        return 8, 16, 1, 24
    if rows >= 1 << 14:
        return 4, 128, 4, 5
    if columns > 4096:
        return 4, 128, 4, 7
    return (4, 64, 2, 12) if columns > 1024 else (4, 32, 1, 24)


def programs_of(tiles: int, most: int) -> int:
    """So many that each has as many tiles as the others, or one less."""
    return -(-tiles // -(-tiles // most))


def nibble_matvec(
    x: Fixed,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    processors: int,
    gate: str | None = None,
    shape: tuple[int, int, int, int] | None = None,
    early: bool = False,
) -> Tensor:
    """A vector as `quantised_rows.fix` makes it times [O, I] → [1, O]; with `gate` act(first half) * second half,
    [1, O / 2]. `shape`: see `shape_of`. All programs run at a time and stay, so that those of the next kernel, which
    start early, take no place from them.
    """
    rows, columns = weight.shape
    out = torch.empty(1, rows if gate is None else rows // 2, dtype=dtype, device=weight.device)
    each, turn, warps, resident = shape or shape_of(rows, columns)
    launch(
        _nibble_matvec, (programs_of(triton.cdiv(rows, each), processors * resident),),
        *x, weight.data, weight.scale, weight.scale if bias is None else bias, out, rows, weight.unit,
        VECTORS=weight.data.shape[1] // 4, WIDTH=weight.width, GROUP=weight.group, GROUPS=weight.groups,
        ROWS=each, TURN=turn, BIAS=bias is not None, GATE=gate, EARLY=early, num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out
