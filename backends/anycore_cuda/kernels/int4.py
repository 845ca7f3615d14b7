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
from anycore_cuda.kernels.matvec import EARLY_BYTES, store_row
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_rows import Fixed


@triton.jit
def _pairs(
    scale_at, start, half, known, VECTORS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    # Scales and offsets, in turn, of the four planes that one half of the words of a turn's vectors is of.
    at = tl.arange(0, TURN * 2)
    vector = start + at // 2
    column = vector * 4 // WIDTH * (8 * WIDTH) + half * 4 * WIDTH
    group = tl.minimum(column // GROUP, GROUPS - 1)
    inside = known[:, None] & (vector < VECTORS)[None, :]
    return tl.load(scale_at + (group * 2 + at % 2)[None, :], mask=inside, other=0.0)


@triton.jit
def _four(words, ROWS: tl.constexpr, TURN: tl.constexpr):
    # [ROWS, TURN * 4] → each vector's four words, [ROWS, TURN]: what a thread has anyway.
    even, odd = tl.split(tl.reshape(words, [ROWS, TURN, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot16(a, b, c, d, x_at, inside, total, TURN: tl.constexpr):
    # total + the products of four words' bytes, which have no sign, with the vector's.
    e, f, g, h = _four(tl.load(x_at, mask=inside, other=0)[None, :], 1, TURN)
    return dot4(d, h, dot4(c, g, dot4(b, f, dot4(a, e, total, False), False), False), False)


@triton.jit
def _half(
    a, b, c, d, pairs, x_at, word, unit, total,
    MASK: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    # The products of one half of a turn's words, under their scales and offsets.
    a, b, c, d = a & MASK, b & MASK, c & MASK, d & MASK
    inside = word < WORDS
    sums = _dot16(a, b, c, d, x_at + word, inside, tl.zeros([ROWS, TURN], tl.int32), TURN)
    sums = _dot16(a, b, c, d, x_at + 2 * WORDS + word, inside, sums * 256, TURN)
    scale, offset = tl.split(tl.reshape(pairs.to(tl.float32), [ROWS, TURN, 2]))
    return scale * (sums.to(tl.float32) * unit[None, :]) - offset * total[None, :]


@triton.jit(do_not_specialize=["rows"])
def _nibble_matvec(
    x_ptr, unit_ptr, sum_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, rows, unit,
    VECTORS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    TURN: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    if GATE is not None:
        row = row // 2 + row % 2 * (rows // 2)  # in turn of the gate and of what it multiplies
    # Two-dimensional and with whole runs in memory, then reshaped: threads keep four words each, neighbours in a row.
    at, vector = tl.arange(0, TURN * 4), tl.arange(0, TURN)
    WORDS: tl.constexpr = VECTORS * 4
    data_at = data_ptr + row.to(tl.int64)[:, None] * WORDS + at[None, :]
    scale_at = scale_ptr + row.to(tl.int64)[:, None] * (GROUPS * 2)
    # The weights of the first turn are on their way before the vector is there to be read.
    flat = tl.load(data_at, mask=known[:, None] & (at < WORDS)[None, :], other=0)
    first = _pairs(scale_at, 0, 0, known, VECTORS, WIDTH, GROUP, GROUPS, TURN)
    second = _pairs(scale_at, 0, 1, known, VECTORS, WIDTH, GROUP, GROUPS, TURN)
    wait(EARLY)

    acc = tl.zeros([ROWS, TURN], tl.float32)
    for start in range(0, VECTORS, TURN):
        a, b, c, d = _four(flat, ROWS, TURN)
        firsts, seconds = first, second
        later = (start + TURN) * 4
        flat = tl.load(data_at + later, mask=known[:, None] & (later + at < WORDS)[None, :], other=0)
        first = _pairs(scale_at, start + TURN, 0, known, VECTORS, WIDTH, GROUP, GROUPS, TURN)
        second = _pairs(scale_at, start + TURN, 1, known, VECTORS, WIDTH, GROUP, GROUPS, TURN)
        here, word = start + vector, start * 4 + at
        x_unit = tl.load(unit_ptr + here // 8, mask=here < VECTORS, other=0.0)
        sum_first = tl.load(sum_ptr + here, mask=here < VECTORS, other=0.0)
        sum_second = tl.load(sum_ptr + VECTORS + here, mask=here < VECTORS, other=0.0)
        # The second half's numbers are left where they are in a byte, and so 16 times as large.
        low: tl.constexpr = 0x0F0F0F0F
        high: tl.constexpr = -0x0F0F0F10
        acc += _half(a, b, c, d, firsts, x_ptr, word, x_unit, sum_first, low, WORDS, ROWS, TURN)
        acc += _half(a, b, c, d, seconds, x_ptr + WORDS, word, x_unit / 16, sum_second, high, WORDS, ROWS, TURN)
    store_row(tl.sum(acc, axis=1) * unit, row, known, bias_ptr, out_ptr, rows, ROWS, BIAS, GATE)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, vectors of 32 numbers a turn, and warps of a program: 16 bytes a thread and row."""
    vectors = -(-columns // 32)
    turn = 32 if vectors <= 32 else 64 if vectors <= 128 else 128
    return 4, turn, turn // 32


def nibble_matvec(
    x: Fixed,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    gate: str | None = None,
    shape: tuple[int, int, int] | None = None,
    early: bool = False,
) -> Tensor:
    """A vector as `quantised_rows.fix` makes it times [O, I] → [1, O]; with `gate` act(first half) * second half,
    [1, O / 2]. `shape`: see `shape_of`.
    """
    rows, columns = weight.shape
    out = torch.empty(1, rows if gate is None else rows // 2, dtype=dtype, device=weight.device)
    each, turn, warps = shape or shape_of(rows, columns)
    early = early and weight.data.nbytes <= EARLY_BYTES
    launch(
        _nibble_matvec, (triton.cdiv(rows, each),),
        *x, weight.data, weight.scale, weight.scale if bias is None else bias, out, rows, weight.unit,
        VECTORS=weight.data.shape[1] // 4, WIDTH=weight.width, GROUP=weight.group, GROUPS=weight.groups,
        ROWS=each, TURN=turn, BIAS=bias is not None, GATE=gate, EARLY=early, num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out
