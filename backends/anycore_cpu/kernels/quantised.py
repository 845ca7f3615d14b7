"""Quantised matrices for the kernels: int8 and int4 with a scale for each group, packed as they are.

Rows are rounded to int8 by the same groups as the matrix they multiply, each group by its own largest element.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, Weight

if TYPE_CHECKING:
    from anycore_cpu.kernels.library import Kernels

GROUPS = (16, 32, 64, 128)
"""Inputs of a group. A whole row may be one, too."""

MIDDLE = 8
"""The zero point that 4 bits have anyway."""

TOP = 14
"""Powers of two that the largest scale is below, so that small ones keep all bits of their 16."""


class Layout(ctypes.Structure):
    """`struct Quantised` of quantised.hpp."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "group")),
        *((name, ctypes.c_int32) for name in ("bits", "minimums")),
        ("factor", ctypes.c_float),
    )


SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[int]] | None, tuple[type, ...]]] = {
    "anycore_quantised_size": (ctypes.c_long, (ctypes.POINTER(Layout),)),
    "anycore_quantised_pack": (None, (ctypes.POINTER(Layout), *[ctypes.c_void_p] * 3)),
    "anycore_quantised_round": (
        None,
        (ctypes.c_void_p, *[ctypes.c_long] * 3, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2),
    ),
    "anycore_quantised_linear": (
        None,
        (
            ctypes.POINTER(Layout),
            ctypes.c_void_p,
            ctypes.c_long,
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int,
        ),
    ),
    "anycore_quantised_rows": (
        None,
        (ctypes.POINTER(Layout), ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_int),
    ),
}


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix [outputs, inputs] in panels; `layout` tells the kernels where `data` lies and what is in it."""

    data: Tensor
    layout: Layout

    @property
    def outputs(self) -> int:
        return int(self.layout.outputs)

    @property
    def inputs(self) -> int:
        return int(self.layout.inputs)


def packable(weight: Weight) -> TypeGuard[Int8Weight | Int4Weight]:
    """Whether the kernels multiply by it as it is; else it has to be made dense."""
    if not isinstance(weight, (Int8Weight, Int4Weight)) or weight.dtype != torch.bfloat16:
        return False
    return weight.group in GROUPS or weight.group >= weight.shape[1]


def rounded(kernels: Kernels, weight: Tensor, wanted: Format) -> Int8Weight:
    """A dense matrix in int8, to the nearest: see `Ops.quantise`."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    group = wanted.group or columns
    data = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows, -(-columns // group), dtype=torch.float32)
    kernels.library.anycore_quantised_round(
        weight.data_ptr(), rows, columns, group, weight.dtype == torch.float32, not wanted.group,
        data.data_ptr(), scale.data_ptr(),
    )  # fmt: skip
    return Int8Weight(data, scale, group, weight.dtype)


def pack(kernels: Kernels, weight: Int8Weight | Int4Weight) -> QuantisedMatrix:
    """The same numbers in panels; scales of groups are rounded to 16 bits, those of whole rows of int8 are not."""
    outputs, inputs = weight.shape
    bits = 4 if isinstance(weight, Int4Weight) else 8
    scale, minimum = weight.scale, None
    if isinstance(weight, Int4Weight) and bool((weight.zero != MIDDLE).any()):
        minimum = (weight.zero - MIDDLE) * scale
    factor = 1.0
    if bits == 4 or weight.group < inputs:
        largest = max(float(x.abs().max()) for x in (scale, minimum) if x is not None)
        factor = 2.0 ** (math.frexp(largest)[1] - TOP) if 0 < largest < math.inf else 1.0
        scale = (scale / factor).half()
        minimum = None if minimum is None else (minimum / factor).half().contiguous()
    layout = Layout(None, outputs, inputs, weight.group, bits, minimum is not None, factor)
    data = torch.empty(kernels.library.anycore_quantised_size(layout), dtype=torch.uint8)
    layout.packed = data.data_ptr()
    numbers, scale = weight.data.contiguous(), scale.contiguous()
    kernels.library.anycore_quantised_pack(
        layout, numbers.data_ptr(), scale.data_ptr(), None if minimum is None else minimum.data_ptr()
    )
    return QuantisedMatrix(data, layout)


def linear(kernels: Kernels, x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None, wide: bool = False) -> Tensor:
    """[.., inputs] bfloat16 → [.., outputs], in float32 if `wide`."""
    if x.dtype != torch.bfloat16 or x.shape[-1] != matrix.inputs:
        wanted = f"bfloat16 rows of {matrix.inputs}"
        raise ValueError(f"this quantised matrix is multiplied by {wanted}, not by {x.dtype} {tuple(x.shape)}")
    rows = x.reshape(-1, matrix.inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
    out = torch.empty(*x.shape[:-1], matrix.outputs, dtype=torch.float32 if wide else torch.bfloat16)
    kernels.library.anycore_quantised_linear(
        matrix.layout,
        rows.data_ptr(),
        len(rows),
        rows.stride(0),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        wide,
    )
    return out


def embedding(kernels: Kernels, ids: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """[T] int64 → [T, inputs] bfloat16: rows of the matrix, NaN where it has no such row."""
    ids = ids.contiguous()
    out = torch.empty(len(ids), matrix.inputs, dtype=torch.bfloat16)
    kernels.library.anycore_quantised_rows(matrix.layout, ids.data_ptr(), len(ids), out.data_ptr(), False)
    return out
