"""What `anycore convert` writes: quantised matrices as compressed-tensors has them, and the settings that say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, QuantisedWeight
from anycore.models.quantised.words import pack

HEAD_GROUP = 32
"""Inputs that share a scale in a table of 8 bits: so the head multiplies what it is given as it is. Rounded, that costs
a small model as much as all its layers do.
"""


def wanted(scheme: str, group: int, columns: int, table: bool = False) -> Format:
    """The format to round to. A scale a row is a group of all columns: so it has few enough bits to be stored in 16."""
    return {
        "w8a8": Format("int8", HEAD_GROUP if table and columns % HEAD_GROUP == 0 else columns),
        "w4a16": Format("int4", group),
        "fp8": Format("fp8", columns),
    }[scheme]


def encoded(layer: str, weight: QuantisedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one layer, by name. Scales have `dtype`, which must hold theirs."""
    if isinstance(weight, Fp8Weight):
        return {f"{layer}.weight": weight.data, f"{layer}.weight_scale": weight.scale[:, None].to(dtype)}
    if not isinstance(weight, Int4Weight):
        return {f"{layer}.weight": weight.data, f"{layer}.weight_scale": weight.scale.to(dtype)}
    return {
        f"{layer}.weight_packed": pack(weight.data, 4),
        f"{layer}.weight_scale": weight.scale.to(dtype),
        f"{layer}.weight_zero_point": pack(weight.zero.T, 4).T.contiguous(),
        f"{layer}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def settings(scheme: str, group: int, tables: Mapping[str, Format], dense: Iterable[str]) -> dict[str, Any]:
    """The quantization_config; `tables` are those that are quantised, `dense` the layers that stay as they were."""
    floats = scheme == "fp8"
    activations = {
        "num_bits": 8,
        "type": "float" if floats else "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    apart = scheme == "w8a8" and any(kind.group == HEAD_GROUP for kind in tables.values())
    linear = described(scheme, group if scheme == "w4a16" else None)
    linear |= {"targets": ["Linear", "Embedding"] if tables and not apart else ["Linear"]}
    groups = {"group_0": linear | {"input_activations": None if scheme == "w4a16" else activations}}
    if apart:
        groups["group_1"] = described(scheme, HEAD_GROUP) | {"targets": ["re:.*embed_tokens$", "lm_head"]}
    layout = {"w8a8": "int-quantized", "w4a16": "pack-quantized", "fp8": "float-quantized"}[scheme]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
    }


def described(scheme: str, group: int | None) -> dict[str, Any]:
    """One of config_groups, without its targets: weights with a scale a `group` of inputs, or a row if that is None."""
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "w4a16" else 8,
        "type": "float" if scheme == "fp8" else "int",
        "symmetric": scheme != "w4a16",
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    return {"weights": weights, "input_activations": None, "output_activations": None}
