"""Which kernel multiplies a quantised matrix: one row is reading, few are tiles, many are left to libraries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from anycore_cuda.kernels import gated, norm
from anycore_cuda.kernels.int4 import nibble_matvec
from anycore_cuda.kernels.int8 import byte_matvec
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import Packed
from anycore_cuda.kernels.quantised_dense import dense_product
from anycore_cuda.kernels.quantised_products import product
from anycore_cuda.kernels.quantised_rows import fix, round_rows
from anycore_cuda.kernels.quantised_shapes import LARGE, SHARED
from anycore_cuda.kernels.quantised_wide import WIDE, WIDE_ROWS, fits, wide_product

TILED_ROWS = 64
"""So many rows at most are multiplied by tiles that are widened in registers; for more the matrix is made dense."""

VARIANTS = (16, 32, 64, *(most for most, _ in WIDE))
"""Up to so many rows, each, kernels of 4 bits differ."""

LIBRARY_ROWS = 65
"""From so many rows on cuBLAS multiplies e4m3, where it can: at 144 rows in 13 us where `product` takes 17."""


@dataclass(frozen=True, slots=True)
class Chip:
    """What the choice depends on."""

    processors: int
    shared: int = SHARED  # bytes of shared memory that a program may have
    early: bool = False  # kernels may start before the one ahead has ended
    e4m3: bool = False  # its tensor cores multiply such numbers
    scaled: bool = False  # and so does cuBLAS, with a scale a row on either side


def chip_of(device: torch.device, processors: int, early: bool) -> Chip:
    if device.type != "cuda":
        return Chip(processors, early=early)
    capability = torch.cuda.get_device_capability(device)
    shared = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    version = tuple(int(word) for word in (torch.version.cuda or "0.0").split(".")[:2])
    return Chip(processors, shared, early, capability >= (8, 9), capability == (9, 0) and version >= (12, 9))


def linear(x: Tensor, weight: Packed, bias: Tensor | None, chip: Chip, dtype: torch.dtype | None = None) -> Tensor:
    """[.., I] → [.., O]."""
    rows = x.reshape(-1, x.shape[-1])
    dtype = dtype or x.dtype
    four = weight.kind == "int4" and rows.element_size() == 2
    if four and launch.rehearses(weight.shape, weight.group, x.dtype, dtype, bias is None):
        for count in VARIANTS:  # prompts may have any number of rows
            linear(rows.new_empty(count, rows.shape[1]), weight, bias, chip, dtype)
    if _is_vector(rows, weight):
        out = _vector(rows, None, None, 0.0, weight, bias, None, chip, dtype)[0]
    elif weight.rounds:
        numbers, scale, _ = round_rows(rows, weight.kind, early=chip.early)
        out = rounded_product(numbers, scale, weight, bias, dtype, chip)
    elif TILED_ROWS < len(rows) <= WIDE_ROWS and chip.shared >= SHARED and fits(rows, weight):
        out = wide_product(rows, weight, bias, dtype, chip.processors, early=chip.early)
    elif len(rows) > _tiled_rows(weight, chip) or rows.dtype == torch.float32:
        out = dense_product(rows, weight, dtype)
        out = out if bias is None else out.add_(bias)
    else:
        out = product(rows, weight, None, bias, dtype, chip.processors, early=chip.early, shared=chip.shared)
    return out.view(*x.shape[:-1], out.shape[-1])


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    eps: float,
    weight: Packed,
    bias: Tensor | None,
    gate: str | None,
    chip: Chip,
) -> tuple[Tensor, Tensor]:
    """As `Ops.norm_linear`."""
    if _is_vector(x, weight):
        return _vector(x, residual, scale, eps, weight, bias, gate, chip, x.dtype)
    if weight.rounds:
        numbers, row_scale, total = round_rows(x, weight.kind, residual, scale, eps, chip.early)
        out = rounded_product(numbers, row_scale, weight, bias, x.dtype, chip)
    else:
        normed, total = norm.rms_norm(x, scale, eps, residual, chip.early)
        out = linear(normed, weight, bias, chip)
    return (out if gate is None else gated.gated(out, gate, chip.early)), total


def rounded_product(
    numbers: Tensor, scale: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype, chip: Chip
) -> Tensor:
    """Rows as `round_rows` leaves them times a matrix that is rounded, too."""
    outputs, columns = weight.shape
    fits = outputs % 16 == 0 and columns % 16 == 0 and dtype == torch.bfloat16
    if chip.scaled and weight.kind == "e4m3" and fits and len(numbers) >= LIBRARY_ROWS:
        other = weight.data.view(torch.float8_e4m3fn).t()
        out = torch._scaled_mm(
            numbers, other, scale_a=scale[:, None], scale_b=weight.scale[None], out_dtype=dtype, use_fast_accum=True
        )
        return out if bias is None else out.add_(bias)
    return product(numbers, weight, scale, bias, dtype, chip.processors, early=chip.early, shared=chip.shared)


def _tiled_rows(weight: Packed, chip: Chip) -> int:
    if weight.kind == "int4":  # large ones may have more, where a program has the shared memory for so many
        return WIDE_ROWS if chip.shared >= SHARED and math.prod(weight.shape) >= LARGE else TILED_ROWS
    return 0 if weight.group else TILED_ROWS


def _is_vector(x: Tensor, weight: Packed) -> bool:
    return len(x) == 1 and (weight.rounds or x.element_size() == 2) and x.stride(-1) == 1


def _vector(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    eps: float,
    weight: Packed,
    bias: Tensor | None,
    gate: str | None,
    chip: Chip,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One row, normed if there is a `scale`: a small kernel prepares it once for the many programs that multiply."""
    if weight.kind == "int4":
        fixed, total = fix(x, weight, residual, scale, eps, chip.early)
        return nibble_matvec(fixed, weight, bias, dtype, chip.processors, gate, early=chip.early), total
    row_scale: Tensor | None = None
    if weight.rounds:
        x, row_scale, total = round_rows(x, weight.kind, residual, scale, eps, chip.early)
    elif scale is not None:
        x, total = norm.rms_norm(x, scale, eps, residual, chip.early)
    else:
        total = x
    return byte_matvec(x, weight, row_scale, bias, dtype, gate, early=chip.early), total
