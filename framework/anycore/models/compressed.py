"""Checkpoints of compressed-tensors: whole numbers packed into words or one a byte, and e4m3, as groups of layers say.

Activations are always rounded a token at a time, whatever `input_activations` says of scales measured before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, spread
from anycore.models.checkpoint import Entry, Ordered
from anycore.models.fp8 import described
from anycore.models.gptq import act_order
from anycore.models.quantised import FLOATS, Matrix, Part, need, need_parts, scales
from anycore.models.words import unpack

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
ENDINGS = (
    "weight_scale",
    "weight",
    "weight_packed",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
)


@dataclass(frozen=True, slots=True)
class Group:
    """How the layers are stored that some targets name: "Linear", a layer's name, or "re:" and a pattern."""

    targets: tuple[str, ...]
    bits: int
    floats: bool  # e4m3; else whole numbers
    symmetric: bool
    size: int  # of a group of inputs; 0: a scale a row, or one for all
    block: tuple[int, int] | None

    def names(self, layer: str) -> bool:
        """Whether a target means this very layer, and not only its class."""
        for target in self.targets:
            pattern = target.removeprefix("re:")
            if target.startswith("re:") and re.match(pattern, layer):
                return True
            if target == layer or layer.endswith("." + target):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Compressed:
    """A layer has weight_packed or weight, weight_scale, and perhaps weight_zero_point and weight_g_idx."""

    groups: tuple[Group, ...]
    endings: tuple[str, ...] = ENDINGS

    @staticmethod
    def of(settings: dict[str, Any]) -> Compressed:
        """Read config.json's quantization_config.

        Raises:
            ValueError: it asks for what is not read.
        """
        if settings.get("format", "dense") not in FORMATS:
            raise ValueError(f"says format {settings['format']!r}; known are {', '.join(FORMATS)}")
        if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise ValueError("says that weights are sparse (sparsity_config), which is not read")
        if settings.get("transform_config"):
            raise ValueError("says that activations are transformed (transform_config), which is not computed")
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ValueError(f"has config_groups that are no groups: {groups!r}")
        return Compressed(tuple(group_of(name, group) for name, group in groups.items()))

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        if not self.groups:
            raise ValueError("weight_scale is there, but config.json has no config_groups that say what it is for")
        group = next((group for group in self.groups if group.names(layer)), self.groups[0])
        if group.floats:
            need_parts(parts, "weight_scale", "weight")
            weight = parts["weight"]
            if weight.type != "F8_E4M3" or len(weight.shape) != 2:
                raise ValueError(f"weight is {weight.type}{list(weight.shape)}, where config.json says 8-bit floats")
            return described(weight.shape, "weight_scale", parts["weight_scale"], group.block)
        return whole_numbers(group, parts)


def group_of(name: str, group: dict[str, Any]) -> Group:
    """One of config_groups.

    Raises:
        ValueError: it is quantised in a way that is not read.
    """
    weights = group.get("weights") or {}
    bits: Any = weights.get("num_bits")
    kind, strategy = weights.get("type", "int"), weights.get("strategy") or "tensor"
    if group.get("format", "dense") not in FORMATS:
        raise ValueError(f"says format {group['format']!r} in {name}; known are {', '.join(FORMATS)}")
    known = (kind == "int" and bits in range(2, 9)) or (kind == "float" and bits == 8)
    strategies = ("tensor", "channel", "group") if kind == "int" else ("tensor", "channel", "block")
    if not known or strategy not in strategies:
        raise ValueError(
            f"says weights of {bits!r} bits, type {kind!r}, strategy {strategy!r} in {name}: read are whole numbers of "
            "2 to 8 bits a tensor, channel or group, and 8-bit floats a tensor, channel or block"
        )
    activations = group.get("input_activations") or {}
    if activations and (activations.get("num_bits") != 8 or activations.get("type", "int") != kind or bits != 8):
        raise ValueError(
            f"says activations of {activations.get('num_bits')!r} bits, type {activations.get('type')!r}, beside "
            f"weights of {bits} bits, type {kind!r}, in {name}: 8 bits of the same type beside 8 bits are computed"
        )
    block = weights.get("block_structure")
    return Group(
        targets=tuple(str(target) for target in group.get("targets", ())),
        bits=bits,
        floats=kind == "float",
        symmetric=bool(weights.get("symmetric", True)),
        size=int(weights.get("group_size") or 0) if strategy == "group" else 0,
        block=(int(block[0]), int(block[1])) if strategy == "block" and block else None,
    )


def whole_numbers(group: Group, parts: Mapping[str, Part]) -> Matrix:
    """Up to 4 bits become an Int4Weight, more symmetric ones an Int8Weight; those with zero points are made dense.

    Raises:
        ValueError: the tensors contradict one another.
    """
    packed = "weight_packed" in parts
    ending = "weight_packed" if packed else "weight"
    need_parts(parts, "weight_scale", ending)
    if len(parts[ending].shape) != 2:
        raise ValueError(f"{ending} has shape {list(parts[ending].shape)}, not two dimensions")
    rows, columns = parts[ending].shape
    need(parts, ending, (rows, columns), "I32" if packed else "I8")
    if packed:
        columns = columns * 32 // group.bits
    size = group.size or columns
    if size < 1 or columns < 1:
        raise ValueError(f"{ending} has {columns} inputs in groups of {size}")
    groups = -(-columns // size)
    if not group.size and parts["weight_scale"].shape in ((), (1,), (rows,)):
        need(parts, "weight_scale", parts["weight_scale"].shape, *FLOATS)
    else:
        need(parts, "weight_scale", (rows, groups), *FLOATS)
    if not group.symmetric:
        need_parts(parts, "weight_zero_point")
        if packed:
            need(parts, "weight_zero_point", (-(-rows * group.bits // 32), groups), "I32")
        elif parts["weight_zero_point"].shape != parts["weight_scale"].shape:
            need(parts, "weight_zero_point", parts["weight_scale"].shape, "I8")
    if "weight_g_idx" in parts:
        need(parts, "weight_g_idx", (columns,), "I32", "I64")
    small = group.bits <= 4

    def read(tensors: Mapping[str, Tensor]) -> Entry:
        return weight(group, tensors, (rows, columns), size)

    if small:
        return Matrix((rows, columns), Format("int4", size), read)
    if group.symmetric:
        return Matrix((rows, columns), Format("int8", group.size), read)
    return Matrix((rows, columns), None, read)


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
        data = (tensors["weight"].short() + middle).to(torch.uint8)
        if group.bits < 8 and int(data.max()) >= 2 * middle:
            raise ValueError(f"weight holds numbers that take more than {group.bits} bits")
    scale = scales(tensors["weight_scale"], "weight_scale").reshape(-1, -(-columns // size)).expand(rows, -1)
    zero = torch.full(scale.shape, float(middle))
    if not group.symmetric:
        points = tensors["weight_zero_point"]
        if "weight_packed" in tensors:
            zero = unpack(points.T, group.bits)[:, :rows].T.float()
        else:
            zero = (points.float() + middle).reshape(-1, scale.shape[1]).expand(rows, -1)
    order = act_order(tensors["weight_g_idx"].long(), size) if "weight_g_idx" in tensors else None
    if order is not None:
        data = data[:, order]
    data, scale, zero = data.contiguous(), scale.contiguous(), zero.contiguous()
    if group.bits <= 4:
        small = Int4Weight(data, scale, zero, size, torch.float32)
        return small if order is None else Ordered(small, order)
    if group.symmetric:
        large = Int8Weight((data.short() - middle).to(torch.int8), scale, size, torch.float32)
        return large if order is None else Ordered(large, order)
    dense = (data.float() - spread(zero, size, columns)) * spread(scale, size, columns)
    return dense if order is None else dense[:, order.argsort()]
