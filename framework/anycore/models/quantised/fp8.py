"""Checkpoints in e4m3: a scale a matrix or a row is kept; a scale a block of rows and inputs is multiplied out.

Blocks (DeepSeek, Qwen: 128 x 128) share scales among rows, which no weight of the contract does. Rounding again to a
scale a row would change the model, so such matrices are made dense; `--quantization` makes them small as it does
any dense checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight
from anycore.models.quantised.announced import Fp8Settings
from anycore.models.quantised.folder import FLOATS, Matrix, Part, need_parts, scales


class Fp8:
    """weight F8_E4M3 [out, in] with weight_scale, of one number or one a row, or weight_scale_inv, one a block."""

    endings = ("weight", "weight_scale", "weight_scale_inv")

    def __init__(self, settings: Fp8Settings) -> None:
        self.settings = settings

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix | None:
        weight = parts["weight"]
        if not weight.type.startswith("F8_"):
            if "weight_scale" in parts or "weight_scale_inv" in parts:
                raise ValueError(f"weight is {weight.type}, though it has scales as if it were F8_E4M3")
            return None
        if weight.type != "F8_E4M3" or len(weight.shape) != 2:
            raise ValueError(f"weight is {weight.type}{list(weight.shape)}: matrices of F8_E4M3 are read")
        ending = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
        need_parts(parts, ending)
        return described(weight.shape, ending, parts[ending], self.settings.block)


def described(shape: tuple[int, ...], ending: str, scale: Part, block: tuple[int, int] | None) -> Matrix:
    """A matrix of e4m3, by the shape of its scales.

    Raises:
        ValueError: it fits neither the matrix nor its rows nor its blocks.
    """
    rows, columns = shape
    if scale.type not in FLOATS:
        raise ValueError(f"{ending} holds {scale.type}, not {' or '.join(FLOATS)}")
    if scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1)):

        def read(tensors: Mapping[str, Tensor]) -> Fp8Weight:
            row = scales(tensors[ending], ending).reshape(-1).expand(rows).contiguous()
            return Fp8Weight(finite(tensors["weight"]), row, torch.float32)

        return Matrix((rows, columns), Format("fp8"), read)
    if block is not None and scale.shape == (-(-rows // block[0]), -(-columns // block[1])):

        def read_blocks(tensors: Mapping[str, Tensor]) -> Tensor:
            wide = scales(tensors[ending], ending).repeat_interleave(block[0], 0)[:rows]
            return finite(tensors["weight"]).float() * wide.repeat_interleave(block[1], 1)[:, :columns]

        return Matrix((rows, columns), None, read_blocks)
    blocks = "" if block is None else f", or one for each block of {list(block)}"
    raise ValueError(
        f"{ending} has shape {list(scale.shape)}: a matrix {[rows, columns]} has one scale, or one a row{blocks}"
    )


def finite(weight: Tensor) -> Tensor:
    """Weights of e4m3, whose only number that is none has all bits but the sign set.

    Raises:
        ValueError: one of them is NaN.
    """
    strange = int(((weight.view(torch.uint8) & 0x7F) == 0x7F).sum())
    if strange:
        raise ValueError(f"weight holds {strange} weights that are NaN")
    return weight
