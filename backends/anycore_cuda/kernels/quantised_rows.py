"""Rows rounded to int8 or e4m3, each by its own largest element, alone or as the norm that makes them leaves them; and
a vector in 16 bits of fixed point, as two bytes a number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.bytes_of_words import COMPILED
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import Packed

LARGEST = {"int8": 127.0, "e4m3": 448.0}
TORCH = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@triton.jit
def largest_of(x):
    # NaN counts as infinite: the row's scale, and with it every result, then is no number either.
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def nearest(x):
    """The nearest integers, ties to even, of numbers below 2**22: adding and taking away rounds."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """To the nearest number of that kind, ties to even."""
    if KIND == "int8":
        out = nearest(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)
    else:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        if not COMPILED:  # what the chip has an instruction for, the interpreter rounds otherwise
            bits = x.to(tl.int32, bitcast=True)
            three = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # bits of the mantissa
            steps = (x + 24576.0) - 24576.0  # of 2**-9
            x = tl.where(tl.abs(x) < 0.015625, steps, three.to(tl.float32, bitcast=True))
        out = x.to(tl.float8e4nv)
    return out


@triton.jit
def _with_residual(x_ptr, residual_ptr, at, inside, RESIDUAL: tl.constexpr):
    # Rounded as it is stored.
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _shrink(x_ptr, residual_ptr, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    # What the norm multiplies a row with.
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _with_residual(x_ptr, residual_ptr, at, at < COLUMNS, RESIDUAL).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares) / COLUMNS + eps)


@triton.jit
def _normed(x, weight_ptr, at, inside, shrink, NORM: tl.constexpr):
    # As float32, rounded where a kernel of its own would store it.
    if NORM:
        x = (x.to(tl.float32) * shrink * tl.load(weight_ptr + at, mask=inside, other=0.0)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _round(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, total_ptr, eps,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    x_ptr += row
    residual_ptr += row
    # A row is read again for each use: from the cache, instead of from registers that keep others from running.
    shrink = _shrink(x_ptr, residual_ptr, eps, COLUMNS, BLOCK, RESIDUAL) if NORM else 1.0
    most = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _with_residual(x_ptr, residual_ptr, at, at < COLUMNS, RESIDUAL)
        most = tl.maximum(most, largest_of(_normed(x, weight_ptr, at, at < COLUMNS, shrink, NORM)))
    largest = tl.max(most)
    inverse = tl.where(largest > 0, LARGEST / largest, 0.0)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + tl.program_id(0), largest / LARGEST)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        if (start // BLOCK) % tl.num_programs(1) == tl.program_id(1):  # programs of a row take turns
            at = start + tl.arange(0, BLOCK)
            x = _with_residual(x_ptr, residual_ptr, at, at < COLUMNS, RESIDUAL)
            wide = _normed(x, weight_ptr, at, at < COLUMNS, shrink, NORM)
            tl.store(out_ptr + row + at, rounded(wide * inverse, KIND), mask=at < COLUMNS)
            if RESIDUAL:
                tl.store(total_ptr + row + at, x, mask=at < COLUMNS)


def round_rows(
    x: Tensor,
    kind: str,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    early: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R, I] → ([R, I] int8 or e4m3, their scales [R] float32, x + residual), after `ops.rms_norm` if given `norm`."""
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(x.shape, dtype=TORCH[kind], device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual.contiguous()
    block = min(4096, triton.next_power_of_2(columns))
    if rows:
        launch(
            _round, (rows, triton.cdiv(columns, block) if rows <= 32 else 1),
            x, added, x if norm is None else norm, out, scale, total, eps,
            COLUMNS=columns, NORM=norm is not None, RESIDUAL=residual is not None, KIND=kind, LARGEST=LARGEST[kind],
            BLOCK=block, EARLY=early, num_warps=max(1, block // 256), **launch_options(early),
        )  # fmt: skip
    return out, scale, total


FIXED = 32512.0
"""The largest number of a part of a vector in fixed point: 127 in its upper byte."""


class Fixed(NamedTuple):
    """A vector in fixed point, as words of a 4-bit matrix hold columns: (256 * upper byte + lower byte) * unit.

    That is off by 2**-16 of the largest of its 256 neighbours: less than what rounding to 16 bits leaves of it.
    """

    bytes: Tensor  # [2, 2, I / 8] int32, four to a word: upper ones and lower ones, of either half of the planes
    unit: Tensor  # [I / 256] float32, of 32 words
    sums: Tensor  # [2, I / 32] float32, of either half of four words


@triton.jit
def _fix(
    x_ptr, residual_ptr, weight_ptr, out_ptr, unit_ptr, sum_ptr, total_ptr, eps,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    FIXED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    shrink = _shrink(x_ptr, residual_ptr, eps, COLUMNS, 1024, RESIDUAL) if NORM else 1.0
    word = tl.program_id(0) * 32 + tl.arange(0, 32)
    plane = tl.arange(0, 8)
    at = (word // WIDTH * (8 * WIDTH) + word % WIDTH)[:, None] + plane[None, :] * WIDTH
    inside = (word < WORDS)[:, None] & (at < COLUMNS)
    x = _with_residual(x_ptr, residual_ptr, at, inside, RESIDUAL)
    if RESIDUAL:
        tl.store(total_ptr + at, x, mask=inside)
    wide = _normed(x, weight_ptr, at, inside, shrink, NORM)
    largest = tl.max(largest_of(wide))
    tl.store(unit_ptr + tl.program_id(0), largest / FIXED)
    numbers = nearest(wide * tl.where(largest > 0, FIXED / largest, 0.0)).to(tl.int32)
    upper = (numbers + 128) >> 8  # what is left is a byte with a sign
    place = (plane % 4 * 8)[None, :]
    uppers = tl.sum(tl.reshape((upper & 255) << place, [32, 2, 4]), axis=2)
    lowers = tl.sum(tl.reshape((numbers & 255) << place, [32, 2, 4]), axis=2)
    to = out_ptr + tl.arange(0, 2)[None, :] * WORDS + word[:, None]
    tl.store(to, uppers, mask=(word < WORDS)[:, None])
    tl.store(to + 2 * WORDS, lowers, mask=(word < WORDS)[:, None])
    sums = tl.sum(tl.sum(tl.reshape(numbers, [8, 4, 2, 4]), axis=3), axis=1).to(tl.float32) * (largest / FIXED)
    vector = tl.program_id(0) * 8 + tl.arange(0, 8)
    vectors: tl.constexpr = WORDS // 4
    place = sum_ptr + tl.arange(0, 2)[None, :] * vectors + vector[:, None]
    tl.store(place, sums, mask=(vector < vectors)[:, None])


def fix(
    x: Tensor,
    weight: Packed,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    early: bool = False,
) -> tuple[Fixed, Tensor]:
    """[1, I] → (it in fixed point for that matrix, x + residual), after `ops.rms_norm` if given `norm`."""
    words = weight.data.shape[1]
    parts = triton.cdiv(words, 32)
    fixed = Fixed(
        torch.empty(2, 2, words, dtype=torch.int32, device=x.device),
        torch.empty(parts, dtype=torch.float32, device=x.device),
        torch.empty(2, words // 4, dtype=torch.float32, device=x.device),
    )
    total = x if residual is None else torch.empty_like(x)
    launch(
        _fix, (parts,), x, x if residual is None else residual, x if norm is None else norm, *fixed, total, eps,
        COLUMNS=weight.columns, WORDS=words, WIDTH=weight.width, NORM=norm is not None, RESIDUAL=residual is not None,
        FIXED=FIXED, EARLY=early, num_warps=4, **launch_options(early),
    )  # fmt: skip
    return fixed, total
