"""A matrix of bytes, int8 or e4m3, times one vector, which is rounded as the matrix is where its format says so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.gated import activated, check_kind
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.matvec import EARLY_BYTES
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import bytes_to_float
from anycore_cuda.kernels.quantised_rows import LARGEST, largest_of, rounded


@triton.jit
def _stream(
    x_ptr, residual_ptr, norm_ptr, at, shrink, COLUMNS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr
):
    # What is multiplied, from the vector with its residual; rounded where separate kernels would store it.
    inside = at < COLUMNS
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    total = x
    if NORM:
        x = (x.to(tl.float32) * shrink * tl.load(norm_ptr + at, mask=inside, other=0.0)).to(x.dtype)
    return x.to(tl.float32), total


@triton.jit(do_not_specialize=["rows"])
def _byte_matvec(
    x_ptr, residual_ptr, norm_ptr, data_ptr, scale_ptr, bias_ptr, out_ptr, total_ptr, rows, eps, unit,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    if GATE is not None:
        row = row // 2 + row % 2 * (rows // 2)  # in turn of the gate and of what it multiplies
    at = tl.arange(0, BLOCK)
    data_at = data_ptr + row.to(tl.int64)[:, None] * COLUMNS + at[None, :]
    # The weights of the first turn are on their way before the vector is there to be read.
    tile = tl.load(data_at, mask=known[:, None] & (at < COLUMNS)[None, :], other=0)
    wait(EARLY)

    shrink = 1.0
    if NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            _, x = _stream(x_ptr, residual_ptr, norm_ptr, start + at, 1.0, COLUMNS, False, RESIDUAL)
            squares += x.to(tl.float32) * x.to(tl.float32)
            if RESIDUAL:  # noqa: SIM102 (a constant)
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + start + at, x, mask=start + at < COLUMNS)
        shrink = tl.rsqrt(tl.sum(squares) / COLUMNS + eps)
    step = 1.0
    if ROUNDS:
        most = tl.zeros([BLOCK], tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            x, _ = _stream(x_ptr, residual_ptr, norm_ptr, start + at, shrink, COLUMNS, NORM, RESIDUAL)
            most = tl.maximum(most, largest_of(x))
        largest = tl.max(most)
        step = largest / LARGEST
        inverse = tl.where(largest > 0, LARGEST / largest, 0.0)

    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        x, _ = _stream(x_ptr, residual_ptr, norm_ptr, start + at, shrink, COLUMNS, NORM, RESIDUAL)
        if ROUNDS:
            x = rounded(x * inverse, KIND)
        numbers = bytes_to_float(tile, KIND, ROUNDS) * x[None, :]
        if GROUP:
            place = scale_ptr + row.to(tl.int64)[:, None] * GROUPS + ((start + at) // GROUP)[None, :]
            inside = known[:, None] & (start + at < COLUMNS)[None, :]
            numbers *= tl.load(place, mask=inside, other=0.0).to(tl.float32)
        acc += numbers
        following = start + BLOCK + at
        tile = tl.load(data_at + start + BLOCK, mask=known[:, None] & (following < COLUMNS)[None, :], other=0)

    out = tl.sum(acc, axis=1) * (step * unit)
    if GROUP == 0:
        out *= tl.load(scale_ptr + row, mask=known, other=0.0)
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
    """Rows, columns a turn, and warps of a program."""
    if columns <= 1024:
        return 4, 1024, 2
    return (4, 2048, 4) if rows >= 2048 else (2, 4096, 8)


def byte_matvec(
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
    each, block, warps = shape or shape_of(rows, columns)
    early = early and weight.data.nbytes <= EARLY_BYTES
    launch(
        _byte_matvec, (triton.cdiv(rows, each),),
        x, x if residual is None else residual, x if norm is None else norm, weight.data, weight.scale,
        weight.scale if bias is None else bias, out, total, rows, eps, weight.unit,
        COLUMNS=columns, GROUP=weight.group, GROUPS=weight.groups, KIND=weight.kind, ROUNDS=weight.rounds,
        LARGEST=LARGEST[weight.kind], ROWS=each, BLOCK=block, BIAS=bias is not None, NORM=norm is not None,
        RESIDUAL=residual is not None, GATE=gate, EARLY=early, num_warps=warps, **launch_options(early),
    )  # fmt: skip
    return out, total
