"""A matrix of bytes, int8 or e4m3, times one vector, which was rounded as the matrix is where its format says so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.bytes_of_words import dot4, four_e4m3
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.matvec import EARLY_BYTES, rows_of, store_row
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import bytes_to_float


@triton.jit
def _word_products(acc, words, x, KIND: tl.constexpr):
    # acc + the sum of each word's four products.
    if KIND == "int8":
        acc = dot4(words, x[None, :], acc, True)
    else:
        a, b, c, d = four_e4m3(words)
        e, f, g, h = four_e4m3(x)
        acc += a * e[None, :]
        acc += b * f[None, :]
        acc += c * g[None, :]
        acc += d * h[None, :]
    return acc


@triton.jit
def _byte_products(
    acc, tile, x, scale_at, start, known, COLUMNS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # acc + the sum of each 16 columns' products, under the scale of their group.
    x = bytes_to_float(x, KIND) if ROUNDS else x.to(tl.float32)
    sums = tl.sum(tl.reshape(bytes_to_float(tile, KIND) * x[None, :], [ROWS, BLOCK // 16, 16]), axis=2)
    if GROUP:
        first = start + tl.arange(0, BLOCK // 16) * 16
        inside = known[:, None] & (first < COLUMNS)[None, :]
        sums *= tl.load(scale_at + (first // GROUP)[None, :], mask=inside, other=0.0).to(tl.float32)
    return acc + sums


@triton.jit(do_not_specialize=["rows"])
def _byte_matvec(
    x_ptr, data_ptr, scale_ptr, row_scale_ptr, bias_ptr, out_ptr, rows, unit,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # With WORDS, columns and all that counts them are words of four bytes.
    let_next_start(EARLY)
    row, known = rows_of(tl.program_id(0), rows, ROWS, GATE)
    at = tl.arange(0, BLOCK)
    data_at = data_ptr + row.to(tl.int64)[:, None] * COLUMNS + at[None, :]
    scale_at = scale_ptr + row.to(tl.int64)[:, None] * GROUPS
    # Two turns are always on their way, the first before the vector is there to be read.
    tile = tl.load(data_at, mask=known[:, None] & (at < COLUMNS)[None, :], other=0)
    ahead = tl.load(data_at + BLOCK, mask=known[:, None] & (BLOCK + at < COLUMNS)[None, :], other=0)
    wait(EARLY)

    sums: tl.constexpr = tl.int32 if WORDS and KIND == "int8" else tl.float32
    acc = tl.zeros([ROWS, BLOCK if WORDS else BLOCK // 16], sums)
    for start in range(0, COLUMNS, BLOCK):
        x = tl.load(x_ptr + start + at, mask=start + at < COLUMNS, other=0)
        if WORDS:
            acc = _word_products(acc, tile, x, KIND)
        else:
            acc = _byte_products(acc, tile, x, scale_at, start, known, COLUMNS, GROUP, KIND, ROUNDS, ROWS, BLOCK)
        tile = ahead
        later = start + 2 * BLOCK
        ahead = tl.load(data_at + later, mask=known[:, None] & (later + at < COLUMNS)[None, :], other=0)

    out = tl.sum(acc, axis=1).to(tl.float32) * unit
    if ROUNDS:
        out *= tl.load(row_scale_ptr)
    if GROUP == 0:
        out *= tl.load(scale_ptr + row, mask=known, other=0.0)
    store_row(out, tl.program_id(0), bias_ptr, out_ptr, rows, ROWS, BIAS, GATE)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns a turn, and warps of a program: 16 bytes a thread and row."""
    if columns <= 1024 or rows >= 1 << 14:
        return 4, 1024, 2
    return (4, 2048, 4) if rows >= 2048 else (2, 4096, 8)


def byte_matvec(
    x: Tensor,
    weight: Packed,
    row_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    gate: str | None = None,
    shape: tuple[int, int, int] | None = None,
    early: bool = False,
) -> Tensor:
    """[1, I], rounded where the weight says so with a scale [1], times [O, I] → [1, O]; with `gate`
    act(first half) * second half, [1, O / 2]. `shape`: see `shape_of`.
    """
    rows, columns = weight.shape
    out = torch.empty(1, rows if gate is None else rows // 2, dtype=dtype, device=x.device)
    each, block, warps = shape or shape_of(rows, columns)
    early = early and weight.data.nbytes <= EARLY_BYTES
    words = weight.rounds and columns % 4 == 0
    data, count = weight.data, 1
    if words:
        x, data, count = x.view(torch.int32), data.view(torch.int32), 4
    elif weight.rounds:
        x = x.view(data.dtype)
    launch(
        _byte_matvec, (triton.cdiv(rows, each),),
        x, data, weight.scale, weight.scale if row_scale is None else row_scale,
        weight.scale if bias is None else bias, out, rows, weight.unit,
        COLUMNS=columns // count, GROUP=weight.group, GROUPS=weight.groups, KIND=weight.kind, ROUNDS=weight.rounds,
        WORDS=words, ROWS=each, BLOCK=block // count, BIAS=bias is not None, GATE=gate, EARLY=early, num_warps=warps,
        **launch_options(early),
    )  # fmt: skip
    return out
