"""A 4-bit matrix times one vector in fixed point, by the tensor cores' products of bytes.

They multiply 16 rows by 8 columns, of which four are used: the vector's upper and lower bytes that belong to the low
halves of a turn's words, and those of the high halves. A thread then has half as many instructions for what it reads as
`int4` needs. Only for blocks of planes of 32 columns; a turn is one block of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.bytes_of_words import COMPILED
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.matvec import rows_of, store_row
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import pair_of
from anycore_cuda.kernels.quantised_products import join
from anycore_cuda.kernels.quantised_rows import Fixed


@triton.jit
def _low(bytes):
    """The low halves, four bytes at a time."""
    if COMPILED:
        low = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [bytes], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        low = bytes & 15
    return low


@triton.jit
def _high(bytes):
    """The high halves, four bytes at a time."""
    if COMPILED:
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.u32 a, $1, 4; and.b32 $0, a, 0x0F0F0F0F; }", "=r,r", [bytes],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        high = bytes >> 4 & 15
    return high


@triton.jit
def _ask(at):
    # Have the lines that hold these brought into the L2 cache.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pairs(pairs_at, turn, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    # Scales and offsets of a turn's two halves.
    first = tl.load(pairs_at + tl.minimum(turn * 256 // GROUP, GROUPS - 1))
    return first, tl.load(pairs_at + tl.minimum((turn * 256 + 128) // GROUP, GROUPS - 1))


@triton.jit
def _of_vector(unit_ptr, sum_ptr, turn, WORDS: tl.constexpr):
    # The vector's unit in a turn, and its sums, of either half.
    part = turn * 8 + tl.arange(0, 8)
    return tl.load(unit_ptr + turn), tl.load(sum_ptr + part), tl.load(sum_ptr + WORDS // 4 + part)


@triton.jit(do_not_specialize=["rows"])
def _nibble_dots(
    x_ptr, unit_ptr, sum_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, rows, unit,
    WORDS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    TURNS: tl.constexpr = WORDS // 32
    EACH: tl.constexpr = (TURNS + SPLITS - 1) // SPLITS
    first = tl.program_id(1) * EACH
    last = tl.minimum(first + EACH, TURNS)
    row, known = rows_of(tl.program_id(0), rows, ROWS, GATE)
    row = tl.minimum(row, rows - 1)
    byte = tl.arange(0, 128)
    # 32 bits are enough for the places: a matrix has fewer bytes than that.
    row_at = data_ptr + row[:, None] * (WORDS * 4)
    pairs_at = scale_ptr.to(tl.pointer_type(tl.int32)) + row * GROUPS
    if EARLY and AHEAD:
        _ask(row_at + tl.minimum(first + tl.arange(0, AHEAD), TURNS - 1)[None, :] * 128)
    pairs, more_pairs = _pairs(pairs_at, first, GROUP, GROUPS)
    wait(EARLY)
    # Of eight columns: upper bytes of the first half, lower ones, upper bytes of the second half, lower ones; nothing.
    n = tl.arange(0, 8)
    x_at = x_ptr + (n % 2 * 2 + n // 2)[None, :] * (WORDS * 4) + byte[:, None]
    acc = tl.zeros([ROWS, 8], tl.float32)
    nothing = tl.zeros([ROWS, 8], tl.int32)
    x_unit, sums, more_sums = _of_vector(unit_ptr, sum_ptr, first, WORDS)
    for turn in range(first, last):
        bytes = tl.load(row_at + turn * 128 + byte[None, :])
        x = tl.load(x_at + turn * 128, mask=(n < 4)[None, :], other=0)
        scale, offset = pair_of(pairs)
        more_scale, more_offset = pair_of(more_pairs)
        factor = tl.where(n % 2 == 0, 256.0 * x_unit, x_unit)
        total = tl.where(n == 0, tl.sum(sums), tl.where(n == 2, tl.sum(more_sums), 0.0))
        # What is read around the words is always a turn ahead.
        following = tl.minimum(turn + 1, last - 1)
        pairs, more_pairs = _pairs(pairs_at, following, GROUP, GROUPS)
        x_unit, sums, more_sums = _of_vector(unit_ptr, sum_ptr, following, WORDS)
        low = tl.dot(_low(bytes), x, nothing, out_dtype=tl.int32)
        high = tl.dot(_high(bytes), x, nothing, out_dtype=tl.int32)
        of_low = (n < 2)[None, :]
        found = tl.where(of_low, low, high).to(tl.float32)
        acc += tl.where(of_low, scale[:, None], more_scale[:, None]) * (found * factor[None, :])
        acc -= tl.where(of_low, offset[:, None], more_offset[:, None]) * total[None, :]
    out = tl.sum(tl.where((n < 4)[None, :], acc, 0.0), axis=1)
    if SPLITS == 1:
        store_row(out * unit, tl.program_id(0), bias_ptr, out_ptr, rows, ROWS, BIAS, GATE)
    else:
        tl.store(part_ptr + tl.program_id(1) * rows + row, out, mask=known)


def fits(weight: Packed) -> bool:
    return weight.kind == "int4" and weight.width == 32 and weight.data.shape[1] % 32 == 0


def nibble_dots(
    x: Fixed,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    gate: str | None = None,
    early: bool = False,
) -> Tensor:
    """A vector as `quantised_rows.fix` makes it times [O, I], where it `fits`, → [1, O]; with `gate`
    act(first half) * second half, [1, O / 2].

    `shape`: rows and warps of a program (16 rows to a warp or more), stages of the pipeline, in how many parts the
    columns are split (with a gate in one), and how many turns of its rows a program asks for before it waits.
    """
    each, warps, stages, splits, ahead = shape
    rows, words = weight.data.shape
    out = torch.empty(1, rows if gate is None else rows // 2, dtype=dtype, device=weight.device)
    splits = triton.cdiv(words // 32, triton.cdiv(words // 32, splits))  # no part without a turn
    parts = torch.empty(splits, 1, rows, dtype=torch.float32, device=weight.device) if splits > 1 else out
    launch(
        _nibble_dots, (triton.cdiv(rows, each), splits),
        x.bytes.view(torch.int8), x.unit, x.sums, weight.data.view(torch.int8), weight.scale,
        weight.scale if bias is None else bias, out, parts, rows, weight.unit,
        WORDS=words, GROUP=weight.group, GROUPS=weight.groups, ROWS=each, SPLITS=splits, BIAS=bias is not None,
        GATE=gate, AHEAD=ahead, EARLY=early, num_warps=warps, num_stages=stages, **launch_options(early),
    )  # fmt: skip
    if splits > 1:
        join(parts, out, weight, None, bias, early)
    return out
