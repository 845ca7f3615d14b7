"""A 4-bit matrix times one vector: nothing but reading the matrix, if its numbers are unpacked in few instructions.

A thread reads four words, 32 numbers, of several rows, and the parts of the vector that belong to them once. Numbers
become floats by putting bits together; a group's scale and offset are applied to its sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.gated import activated, check_kind
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.matvec import EARLY_BYTES
from anycore_cuda.kernels.quantised import HIGH, LEFT, Packed, last_plane, planes_together
from anycore_cuda.kernels.quantised_dense import nibble


@triton.jit
def _stream(x_ptr, residual_ptr, at, inside, RESIDUAL: tl.constexpr):
    # The vector with its residual, rounded as it is stored.
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _columns(vector, COLUMNS: tl.constexpr, LAST: tl.constexpr):
    # The first column of a vector's four in the first plane, and the columns from a plane to the next.
    block = vector // 8
    plane = tl.where(block < COLUMNS // 256, 32, LAST) if LAST else 32
    return block * 256 + vector % 8 * 4, plane


@triton.jit(do_not_specialize=["rows"])
def _nibble_matvec(
    x_ptr, residual_ptr, norm_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, total_ptr, rows, eps, unit, shift, high,
    COLUMNS: tl.constexpr, VECTORS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LAST: tl.constexpr,
    TOGETHER: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    if GATE is not None:
        row = row // 2 + row % 2 * (rows // 2)  # in turn of the gate and of what it multiplies
    # Two-dimensional and with whole runs in memory, then reshaped: threads keep four words each, neighbours in a row.
    quarter = tl.arange(0, TURN * 4) // 4
    at_word, at_pair = tl.arange(0, TURN * 4), tl.arange(0, TURN * 2)
    data_at = data_ptr + row.to(tl.int64)[:, None] * (VECTORS * 4) + at_word[None, :]
    scale_at = scale_ptr + row.to(tl.int64)[:, None] * (GROUPS * 2)
    # The weights of the first turn are on their way before the vector is there to be read.
    flat = tl.load(data_at, mask=known[:, None] & (quarter < VECTORS)[None, :], other=0)
    wait(EARLY)

    if NORM:
        squares = tl.zeros([TURN * 32], tl.float32)
        for start in range(0, COLUMNS, TURN * 32):
            at = start + tl.arange(0, TURN * 32)
            x = _stream(x_ptr, residual_ptr, at, at < COLUMNS, RESIDUAL)
            if RESIDUAL:  # noqa: SIM102 (a constant)
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + at, x, mask=at < COLUMNS)
            squares += x.to(tl.float32) * x.to(tl.float32)
        shrink = tl.rsqrt(tl.sum(squares) / COLUMNS + eps)

    acc = tl.zeros([ROWS, TURN], tl.float32)
    for start in range(0, VECTORS, TURN):
        words = tl.reshape(flat, [ROWS, TURN, 4])
        left = words * shift
        column, plane = _columns(start + quarter, COLUMNS, LAST)
        column = tl.multiple_of(column, 4) + at_word % 4
        pair_column, pair_plane = _columns(start + at_pair // 2, COLUMNS, LAST)
        inside = start + quarter < VECTORS
        for turn in tl.static_range(8 // TOGETHER):
            group = tl.minimum((pair_column + turn * TOGETHER * pair_plane) // GROUP, GROUPS - 1)
            pair_inside = known[:, None] & (start + at_pair // 2 < VECTORS)[None, :]
            pair = tl.load(scale_at + (group * 2 + at_pair % 2)[None, :], mask=pair_inside, other=0.0)
            scale, offset = tl.split(tl.reshape(pair.to(tl.float32), [ROWS, TURN, 2]))
            sums = tl.zeros([ROWS, TURN, 4], tl.float32)
            total = tl.zeros([TURN * 4], tl.float32)
            origins = tl.zeros([TURN * 4], tl.float32)
            for number in tl.static_range(TOGETHER):
                at = column + (turn * TOGETHER + number) * plane
                x = _stream(x_ptr, residual_ptr, at, inside & (at < COLUMNS), RESIDUAL)
                if NORM:
                    weight = tl.load(norm_ptr + at, mask=inside & (at < COLUMNS), other=0.0)
                    x = (x.to(tl.float32) * shrink * weight).to(x.dtype)
                x = x.to(tl.float32)
                numbers, origin = nibble(words, left, high, turn * TOGETHER + number)
                total += x
                origins += x * origin
                sums += numbers * tl.reshape(x, [TURN, 4])[None]
            all_of_x = tl.sum(tl.reshape(total, [TURN, 4]), axis=1)[None, :]
            too_much = tl.sum(tl.reshape(origins, [TURN, 4]), axis=1)[None, :]
            acc += scale * (tl.sum(sums, axis=2) - too_much) - offset * all_of_x
        following = start + TURN + quarter < VECTORS
        flat = tl.load(data_at + (start + TURN) * 4, mask=known[:, None] & following[None, :], other=0)

    out = tl.sum(acc, axis=1) * unit
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        out += tl.load(bias_ptr + row, mask=known, other=0.0).to(tl.float32)
    if GATE is None:
        tl.store(out_ptr + row, out.to(dtype), mask=known)
    else:
        # Rounded where separate kernels would, so that both ways give the same numbers.
        gate, up = tl.split(tl.reshape(out.to(dtype).to(tl.float32), [ROWS // 2, 2]))
        out_row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        product = activated(gate, GATE).to(dtype).to(tl.float32) * up
        tl.store(out_ptr + out_row, product.to(dtype), mask=out_row < rows // 2)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, vectors of 32 numbers a turn, and warps of a program."""
    vectors = -(-columns // 32)
    turn = 128 if vectors > 64 else max(32, triton.next_power_of_2(vectors))
    return (8 if rows >= 4096 else 4), turn, turn // 32


def nibble_matvec(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str | None = None,
    shape: tuple[int, int, int] | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """[1, I] times [O, I] → [1, O], and x + residual; as `matvec.norm_matvec` with `norm` and `gate`, without as
    `matvec.matvec`. `shape`: see `shape_of`.
    """
    if gate is not None:
        check_kind(gate)
    rows, columns = weight.shape
    out = x.new_empty(1, rows if gate is None else rows // 2, dtype=dtype or x.dtype)
    total = x if residual is None else torch.empty_like(x)
    each, turn, warps = shape or shape_of(rows, columns)
    early = early and weight.data.nbytes <= EARLY_BYTES
    launch(
        _nibble_matvec, (triton.cdiv(rows, each),),
        x, x if residual is None else residual, x if norm is None else norm, weight.data, weight.scale,
        weight.scale if bias is None else bias, out, total, rows, eps, weight.unit, LEFT, HIGH,
        COLUMNS=columns, VECTORS=weight.data.shape[1] // 4, GROUP=weight.group, GROUPS=weight.groups,
        LAST=last_plane(columns), TOGETHER=planes_together(columns, weight.group), ROWS=each, TURN=turn,
        BIAS=bias is not None, NORM=norm is not None, RESIDUAL=residual is not None, GATE=gate, EARLY=early,
        num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out, total
