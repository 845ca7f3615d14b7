"""A matrix times some tens or hundreds of rows, as in decoding a batch: reading the matrix, with products on the way.

The matrix is cut into tiles of its rows and these into turns of its columns. Programs take as many whole tiles as there
are for all of them, then equal shares of the turns of those left over: no processor is without work at the end. What
several programs have summed of one tile is joined in the order of its columns: the same numbers every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.gated import activated, check_kind
from anycore_cuda.kernels.launch import launch

JOINED = 8
"""Rows that one program joins."""
LINE = tl.constexpr(64)
"""Numbers that one request brings into the L2 cache."""


class Shape(NamedTuple):
    """How a product is cut. A program keeps its tile times all rows in registers: 256 by 128 of them want 8 warps."""

    outs: int  # rows of the matrix in a tile
    columns: int  # of a turn
    programs: int  # in all; 0: one a tile
    warps: int
    stages: int
    last: bool = False  # the program that ends last joins what others have summed, rather than a second launch
    ahead: int = 0  # lines of 128 bytes, of each row of its first tile, that a program asks for before it waits


PROCESSORS = 132
"""Of the chip that shapes were measured on, an H200; for others they are not used."""

MOST_ROWS, LARGE, NARROW = 64, 32 << 20, 2048
"""Up to so many rows, with matrices of so many numbers and columns, products take 4 to 9 % less time than cuBLAS's."""


def variant_of(outs: int, width: int, rows: int, gated: bool = False) -> Shape | None:
    """The shape to multiply some rows with a matrix [O, I] in, or None where cuBLAS should."""
    if rows > MOST_ROWS or outs * width < LARGE or width < NARROW:
        return None
    stages = 5 if rows <= 16 else 4 if rows <= 32 else 3
    return Shape(64, 128, PROCESSORS, 8, stages + 1) if gated else Shape(64, 128, 2 * PROCESSORS, 4, stages)


def deep(outs: int, width: int, rows: int) -> bool:
    """Whether cuBLASLt divides a product's columns better than cuBLAS does: by 3 to 14 % at most of these sizes."""
    return MOST_ROWS < rows < 256 and outs * width >= LARGE and width > 2 * outs


@contextmanager
def by_cublaslt() -> Iterator[None]:
    """Inside, torch asks cuBLASLt for products."""
    before = torch.backends.cuda.preferred_blas_library()
    with catch_warnings():
        simplefilter("ignore")  # it is called experimental, once
        torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def fits(x: Tensor, weight: Any) -> bool:
    """Whether tiles of both can be copied by the engine that does, in 16 bits."""
    return (
        isinstance(weight, Tensor)
        and x.ndim == 2
        and x.dtype == weight.dtype
        and all(m.element_size() == 2 and m.stride(1) == 1 and m.stride(0) % 8 == 0 for m in (x, weight))
        and weight.is_contiguous()
        and all(m.data_ptr() % 16 == 0 for m in (x, weight))
    )


@triton.jit
def _put(out_ptr, bias_ptr, sums, ups, row, out, rows, outs, BIAS: tl.constexpr, GATE: tl.constexpr):
    # Sums [rows, outs] to their place; gated ones are rounded where separate kernels would, as `gated` does.
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        sums += tl.load(bias_ptr + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        if BIAS:
            ups += tl.load(bias_ptr + outs + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
        sums = activated(sums.to(dtype).to(tl.float32), GATE).to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)
    at = row.to(tl.int64)[:, None] * outs + out[None, :]
    tl.store(out_ptr + at, sums.to(dtype), mask=(row < rows)[:, None] & (out < outs)[None, :])


@triton.jit
def _joined(part_ptr, split, row, rows, turns, share, HELD: tl.constexpr, OUTS: tl.constexpr, SIDES: tl.constexpr):
    # Sums of a tile's rows by all programs that had turns of it; the first of them began with its first column.
    first = split * turns // share
    last = (split * turns + turns - 1) // share
    known = (row < rows)[:, None]
    at = part_ptr + row[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
    sums = tl.load(at + (2 * first + 1) * SIDES * HELD * OUTS, mask=known, other=0.0)
    for program in tl.range(first + 1, last + 1, loop_unroll_factor=4):
        sums += tl.load(at + 2 * program * SIDES * HELD * OUTS, mask=known, other=0.0)
    return sums


@triton.jit
def _join_rows(
    bias_ptr, out_ptr, part_ptr, split, tile, row, rows, outs, turns, share,
    HELD: tl.constexpr, OUTS: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    sides: tl.constexpr = 1 if GATE is None else 2
    sums = _joined(part_ptr, split, row, rows, turns, share, HELD, OUTS, sides)
    ups = sums
    if GATE is not None:
        ups = _joined(part_ptr + HELD * OUTS, split, row, rows, turns, share, HELD, OUTS, sides)
    _put(out_ptr, bias_ptr, sums, ups, row, tile * OUTS + tl.arange(0, OUTS), rows, outs, BIAS, GATE)


@triton.jit
def _finish(
    out_ptr, bias_ptr, part_ptr, acc, up, tile, whole, slot, rows, outs,
    FROM: tl.constexpr, COUNT: tl.constexpr, HELD: tl.constexpr, OUTS: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    # A tile's sums so far [OUTS, COUNT], of rows FROM and on: to the result if it is whole, else aside.
    row = FROM + tl.arange(0, COUNT)
    at = tl.arange(0, OUTS)
    if SHARED and not whole:
        sides: tl.constexpr = 1 if GATE is None else 2
        to = part_ptr + slot * sides * HELD * OUTS + row[:, None] * OUTS + at[None, :]
        tl.store(to, tl.trans(acc), mask=(row < rows)[:, None])
        if GATE is not None:
            tl.store(to + HELD * OUTS, tl.trans(up), mask=(row < rows)[:, None])
    else:
        _put(out_ptr, bias_ptr, tl.trans(acc), tl.trans(up), row, tile * OUTS + at, rows, outs, BIAS, GATE)


@triton.jit
def _ask(weight_ptr, row, column, most, width, LINES: tl.constexpr):
    # Have the first lines of some rows brought into the L2 cache; what lies outside is not asked for.
    line = tl.minimum(column + tl.arange(0, LINES) * LINE, width - 1)
    at = weight_ptr + tl.minimum(row, most - 1).to(tl.int64)[:, None] * width + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows", "waves", "turns", "share", "total"])
def _product(
    x_desc, more_desc, weight_desc, weight_ptr, bias_ptr, out_ptr, part_ptr, done_ptr,
    rows, outs, width, waves, turns, share, total,
    ROWS: tl.constexpr, MORE: tl.constexpr, OUTS: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SHARED: tl.constexpr, LAST: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    program = tl.program_id(0)
    held: tl.constexpr = ROWS + MORE
    split_tile = waves * tl.num_programs(0)  # the first of the tiles that programs share
    begin = tl.minimum(program * share, total)
    end = tl.minimum(begin + share, total)
    turn = begin - waves * turns  # before its share come tiles of its own
    own = program
    if EARLY and AHEAD:
        tile = own if waves else begin // turns
        column = 0 if waves else begin % turns * COLUMNS
        soon = tile * OUTS + tl.arange(0, OUTS)
        _ask(weight_ptr, soon, column, outs, width, AHEAD)
        if GATE is not None:
            _ask(weight_ptr, outs + soon, column, 2 * outs, width, AHEAD)
    wait(EARLY)

    while turn < end:
        if turn < begin:
            tile = own
            first = 0
            last = turns
            own += tl.num_programs(0)
        else:
            tile = split_tile + turn // turns
            first = turn % turns
            last = tl.minimum(turns, first + end - turn)
        acc = tl.zeros([OUTS, ROWS], tl.float32)
        more = tl.zeros([OUTS, MORE if MORE else 16], tl.float32)
        up = acc
        more_up = more
        for step in tl.range(first, last):
            weight = weight_desc.load([tile * OUTS, step * COLUMNS])
            x = x_desc.load([0, step * COLUMNS])
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="tf32x3")
            if MORE:
                others = more_desc.load([ROWS, step * COLUMNS])
                more = tl.dot(weight, tl.trans(others), more, input_precision="tf32x3")
            if GATE is not None:
                weight = weight_desc.load([outs + tile * OUTS, step * COLUMNS])
                up = tl.dot(weight, tl.trans(x), up, input_precision="tf32x3")
                if MORE:
                    more_up = tl.dot(weight, tl.trans(others), more_up, input_precision="tf32x3")
        whole = last - first == turns
        split = tile - split_tile
        slot = 2 * program + tl.where(first == 0, 1, 0)
        _finish(
            out_ptr, bias_ptr, part_ptr, acc, up, tile, whole, slot, rows, outs,
            0, ROWS, held, OUTS, BIAS, GATE, SHARED,
        )  # fmt: skip
        if MORE:
            _finish(
                out_ptr, bias_ptr, part_ptr, more, more_up, tile, whole, slot, rows, outs,
                ROWS, MORE, held, OUTS, BIAS, GATE, SHARED,
            )  # fmt: skip
        if LAST and not whole:
            tl.debug_barrier()  # all threads have written what another program may join
            others = (split * turns + turns - 1) // share - split * turns // share
            if tl.atomic_add(done_ptr + split, 1, sem="acq_rel", scope="gpu") == others:
                tl.store(done_ptr + split, 0)  # ready for the next launch
                for start in range(0, rows, JOINED):
                    row = start + tl.arange(0, JOINED)
                    _join_rows(
                        bias_ptr, out_ptr, part_ptr, split, tile, row, rows, outs, turns, share,
                        held, OUTS, BIAS, GATE,
                    )  # fmt: skip
        turn += last - first


@triton.jit(do_not_specialize=["rows", "split_tile", "turns", "share"])
def _join(
    bias_ptr, out_ptr, part_ptr, rows, outs, split_tile, turns, share,
    HELD: tl.constexpr, OUTS: tl.constexpr, JOINED: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    split = tl.program_id(0)
    if split * turns // share != (split * turns + turns - 1) // share:  # else one program had all of it
        row = tl.program_id(1) * JOINED + tl.arange(0, JOINED)
        _join_rows(
            bias_ptr, out_ptr, part_ptr, split, split_tile + split, row, rows, outs, turns, share,
            HELD, OUTS, BIAS, GATE,
        )  # fmt: skip


def parts_of(rows: int) -> tuple[int, int]:
    """Powers of 2 that together hold the rows, the second perhaps 0; each at least as wide as matrix units are.

    Few rows are held in one: kernels then differ at powers of 2 only, where the warm-up looks for them.
    """
    first = 1 << (max(rows, 16).bit_length() - 1)
    if first >= rows:
        return first, 0
    more = max(16, triton.next_power_of_2(rows - first))
    return (2 * first, 0) if more == first or rows <= MOST_ROWS else (first, more)


def product(
    x: Tensor,
    weight: Tensor,
    shape: Shape,
    counters: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    dtype: torch.dtype | None = None,
    early: bool = False,
) -> Tensor:
    """[R, I] times [O, I] → [R, O], summed in float32; with `gate` [2 O, I], and act(first half) * second half.

    `counters` are int32 zeros, one a tile, and zeros again afterwards. An `early` kernel with a shape of lines ahead
    asks for some of the matrix before it waits: it must not be the result of the kernel just before.
    """
    if gate is not None:
        check_kind(gate)
    sides = 1 if gate is None else 2
    rows, width = x.shape
    outs = len(weight) // sides
    first, more = parts_of(rows)
    tiles, turns = triton.cdiv(outs, shape.outs), triton.cdiv(width, shape.columns)
    programs = min(shape.programs or tiles, tiles * turns)
    waves, split = divmod(tiles, programs)
    total = split * turns
    share = triton.cdiv(total, programs)
    out = x.new_empty(rows, outs, dtype=dtype or x.dtype)
    part = out
    if split:
        part = x.new_empty(2 * programs * sides * (first + more) * shape.outs, dtype=torch.float32)
    assert split <= len(counters)
    biased = out if bias is None else bias
    launch(
        _product, (programs,),
        described(x, first, shape.columns), described(x, more or first, shape.columns),
        described(weight, shape.outs, shape.columns), weight, biased, out, part, counters,
        rows, outs, width, waves, turns, share, total,
        ROWS=first, MORE=more, OUTS=shape.outs, COLUMNS=shape.columns, JOINED=JOINED, BIAS=bias is not None,
        GATE=gate, SHARED=split > 0, LAST=split > 0 and shape.last, AHEAD=shape.ahead, EARLY=early,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(early),
    )  # fmt: skip
    if split and not shape.last:
        launch(
            _join, (split, triton.cdiv(rows, JOINED)), biased, out, part, rows, outs, waves * programs, turns, share,
            HELD=first + more, OUTS=shape.outs, JOINED=JOINED, BIAS=bias is not None, GATE=gate, EARLY=early,
            num_warps=4, **launch_options(early),
        )  # fmt: skip
    return out


def described(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix for the engine that copies tiles of it; what lies outside reads as zeros."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # of Triton 3.4 and later

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
