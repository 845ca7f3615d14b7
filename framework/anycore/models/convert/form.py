"""What `anycore convert` writes: quantised matrices as compressed-tensors has them, and the settings that say so."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, QuantisedWeight
from anycore.models.quantised.words import pack
from anycore.models.quantization import FINE, FINER


def wanted(scheme: str, group: int, columns: int, finer: Format | None = None) -> Format:
    """The format to round to; `finer`: 8 bits with a scale a group, if it fits, as tables have them: rounded by the
    token, what a head is given costs a small model as much as all its layers do.

    A scale a row is a group of all columns: so it has few enough bits to be stored in 16.
    """
    if finer is not None and columns % finer.group == 0:
        return finer
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


def settings(
    scheme: str, group: int, grouped: Mapping[str, Format], tables: Collection[str], dense: Iterable[str]
) -> dict[str, Any]:
    """The quantization_config; `grouped` are the matrices with 8 bits by groups, `tables` the quantised ones that are
    looked up or are heads, both by their names in the table of parameters, `dense` the layers that stay as they were.
    """
    floats = scheme == "fp8"
    activations = {
        "num_bits": 8,
        "type": "float" if floats else "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    linear = described(scheme, group if scheme == "w4a16" else None)
    linear |= {"targets": ["Linear", "Embedding"] if set(tables) - set(grouped) else ["Linear"]}
    groups = {"group_0": linear | {"input_activations": None if scheme == "w4a16" else activations}}
    layout = {"w8a8": "int-quantized", "w4a16": "pack-quantized", "fp8": "float-quantized"}[scheme]
    for kind in (FINE, FINER):
        layers = sorted(name.removesuffix(".weight") for name, its in grouped.items() if its == kind)
        if layers:
            targets = [layer if layer == "lm_head" else f"re:.*{re.escape(layer)}$" for layer in layers]
            groups[f"group_{len(groups)}"] = described("w8a8", kind.group) | {"targets": targets}
    if len(groups) > 1 and scheme == "w4a16":
        first, *others = groups.values()
        first["format"] = layout
        for other in others:
            other["format"] = "int-quantized"
        layout = "mixed-precision"
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
