"""What `anycore convert` writes: quantised matrices as compressed-tensors has them, and the settings that say so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, QuantisedWeight
from anycore.models.quantised.words import pack


def wanted(scheme: str, group: int, columns: int) -> Format:
    """The format to round to. A scale a row is a group of all columns: so it has few enough bits to be stored in 16."""
    return {
        "w8a8": Format("int8", columns),
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


def settings(scheme: str, group: int, tables: bool, dense: Iterable[str]) -> dict[str, Any]:
    """The quantization_config; `dense` are the layers that stay as they were."""
    floats = scheme == "fp8"
    weights: dict[str, Any] = {
        "num_bits": 4 if scheme == "w4a16" else 8,
        "type": "float" if floats else "int",
        "symmetric": scheme != "w4a16",
        "strategy": "group" if scheme == "w4a16" else "channel",
        "group_size": group if scheme == "w4a16" else None,
        "dynamic": False,
    }
    activations = {
        "num_bits": 8,
        "type": "float" if floats else "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    layout = {"w8a8": "int-quantized", "w4a16": "pack-quantized", "fp8": "float-quantized"}[scheme]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear", "Embedding"] if tables else ["Linear"],
                "weights": weights,
                "input_activations": None if scheme == "w4a16" else activations,
                "output_activations": None,
            }
        },
        "ignore": sorted(dense),
        "kv_cache_scheme": None,
    }
