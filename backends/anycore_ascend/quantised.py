"""Products with quantised weights: int8 times int8 with scales by row and column, and int4 in groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anycore.contract.weights import Int4Weight, Int8Weight, QuantisedWeight

LARGEST = 65535
"""Of the last dimension of an int8 operand."""


@dataclass(frozen=True, slots=True)
class Int8Handle:
    """W8A8: each row of what comes in is rounded to int8 by its largest element."""

    parts: tuple[tuple[Tensor, Tensor], ...]  # data [in, out] int8 and scale [out] float32; a large head is several
    outputs: int

    @staticmethod
    def of(data: Tensor, scale: Tensor) -> Int8Handle:
        """From [out, in] and [out]."""
        parts = zip(torch.split(data, LARGEST), torch.split(scale, LARGEST), strict=True)
        return Int8Handle(tuple((rows.t().contiguous(), sizes.float()) for rows, sizes in parts), len(data))

    def __call__(self, x: Tensor) -> Tensor:
        rows, sizes = torch.ops.npu.npu_dynamic_quant(x)
        product = torch.ops.npu.npu_quant_matmul
        outs = [product(rows, data, scale, pertoken_scale=sizes, output_dtype=x.dtype) for data, scale in self.parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


@dataclass(frozen=True, slots=True)
class Int4Handle:
    """W4A16: (data + offset) * scale is made inside the product."""

    data: Tensor  # [in, out / 8] int32: eight numbers -8 … 7 each
    scale: Tensor  # [groups, out]
    offset: Tensor  # [groups, out]
    group: int
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.npu.npu_weight_quant_batchmatmul
        form = {"antiquant_offset": self.offset, "antiquant_group_size": self.group}
        out: Tensor = product(x, self.data, self.scale, **form)
        return out


def pack(weight: QuantisedWeight) -> Int8Handle | Int4Handle | Tensor:
    """A handle, or the dense matrix where the operators do not take this one."""
    outputs, inputs = weight.shape
    if weight.dtype == torch.float32:
        return weight.dense()
    if isinstance(weight, Int8Weight):
        fits = inputs <= LARGEST and weight.group >= inputs
        return Int8Handle.of(weight.data, weight.scale[:, 0]) if fits else weight.dense()
    if not isinstance(weight, Int4Weight) or weight.group % 32 or weight.group >= inputs or outputs % 8:
        return weight.dense()
    data = torch.ops.npu.npu_convert_weight_to_int4pack((weight.data.t().to(torch.int32) - 8).contiguous())
    scale, offset = (x.t().to(weight.dtype).contiguous() for x in (weight.scale, 8 - weight.zero))
    return Int4Handle(data, scale, offset, weight.group, outputs)
