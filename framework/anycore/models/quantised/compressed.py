"""Checkpoints of compressed-tensors: whole numbers packed into words or one a byte, and e4m3, as groups of layers say.

Activations are always rounded a token at a time, whatever `input_activations` says of scales measured before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anycore.models.checkpoint import Entry
from anycore.models.quantised.announced import CompressedSettings, Group
from anycore.models.quantised.folder import (
    FLOATS,
    Matrix,
    Part,
    eight_bits,
    four_bits,
    in_order,
    need,
    need_parts,
    scales,
    two_dimensions,
)
from anycore.models.quantised.fp8 import described
from anycore.models.quantised.gptq import act_order
from anycore.models.quantised.words import unpack


class Compressed:
    """A layer has weight_packed or weight, weight_scale, and perhaps weight_zero_point and weight_g_idx."""

    endings = ("weight_scale", "weight", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, settings: CompressedSettings) -> None:
        self.settings = settings

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        group = self.settings.group(layer) or self.settings.group(layer, table=True)
        if group is None:
            raise ValueError("weight_scale is there, but config.json has no config_groups that say what it is for")
        if group.floats:
            need_parts(parts, "weight_scale", "weight")
            shape = two_dimensions(parts, "weight", "[outputs, inputs]")
            need(parts, "weight", shape, "F8_E4M3")
            return described(shape, "weight_scale", parts["weight_scale"], group.block)
        return whole_numbers(group, parts)


def whole_numbers(group: Group, parts: Mapping[str, Part]) -> Matrix:
    """Describe a matrix of whole numbers.

    Raises:
        ValueError: its tensors contradict one another.
    """
    packed = "weight_packed" in parts
    ending = "weight_packed" if packed else "weight"
    need_parts(parts, "weight_scale", ending)
    rows, columns = two_dimensions(parts, ending, "[outputs, inputs]")
    need(parts, ending, (rows, columns), "I32" if packed else "I8")
    if packed:
        columns = columns * 32 // group.bits
    size = group.size or columns
    if size < 1 or columns < 1:
        raise ValueError(f"{ending} has {columns} inputs in groups of {size}")
    groups = -(-columns // size)
    one_each = not group.size and parts["weight_scale"].shape in ((), (1,), (rows,))
    need(parts, "weight_scale", parts["weight_scale"].shape if one_each else (rows, groups), *FLOATS)
    if not group.symmetric:
        need_parts(parts, "weight_zero_point")
        points = (-(-rows * group.bits // 32), groups) if packed else parts["weight_scale"].shape
        need(parts, "weight_zero_point", points, "I32" if packed else "I8")
    if "weight_g_idx" in parts:
        need(parts, "weight_g_idx", (columns,), "I32", "I64")

    def read(tensors: Mapping[str, Tensor]) -> Entry:
        return weight(group, tensors, (rows, columns), size)

    return Matrix((rows, columns), group.format(columns), read)


def weight(group: Group, tensors: Mapping[str, Tensor], shape: tuple[int, int], size: int) -> Entry:
    """Put a matrix of whole numbers together: an Int4Weight, an Int8Weight, or what they stand for."""
    rows, columns = shape
    middle = 2 ** (group.bits - 1)
    if "weight_packed" in tensors:
        written = tensors["weight_shape"].tolist() if "weight_shape" in tensors else [rows, columns]
        if written != [rows, columns]:
            raise ValueError(f"weight_shape says {written}, but weight_packed holds {[rows, columns]}")
        data = unpack(tensors["weight_packed"], group.bits)[:, :columns]
    else:
        signed = tensors["weight"].short() + middle
        if int(signed.min()) < 0 or int(signed.max()) >= 2 * middle:
            raise ValueError(f"weight holds numbers that take more than {group.bits} bits")
        data = signed.to(torch.uint8)
    groups = -(-columns // size)
    scale = scales(tensors["weight_scale"], "weight_scale").reshape(-1, groups).expand(rows, -1)
    zero = torch.full_like(scale, float(middle))
    if not group.symmetric:
        points = tensors["weight_zero_point"]
        if "weight_packed" in tensors:
            zero = unpack(points.T, group.bits)[:, :rows].T.float()
        else:
            zero = (points.float() + middle).reshape(-1, groups).expand(rows, -1)
    order = act_order(tensors["weight_g_idx"], "weight_g_idx", size) if "weight_g_idx" in tensors else None
    data = data if order is None else data[:, order]
    if group.bits <= 4:
        return in_order(four_bits(data, scale, zero, size), order)
    return in_order(eight_bits(data, scale, zero, size, group.symmetric, whole_row=not group.size), order)
