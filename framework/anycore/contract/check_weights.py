"""Checks of products with quantised weights, however a backend packs them, against what they stand for in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend
from anycore.contract.checks import TOLERANCE
from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight, Weight

ROUNDED = 4e-2
"""Absolute error allowed where a row of numbers near 1 may be rounded to int8."""

ROUNDED_FP8 = 2e-1
"""The same for e4m3, which has three bits behind the point: a number is off by a 28th of itself on average, and so a
row of results near 1.5 by 0.054. Of thousands of results one may well be off by more than twice that."""

SHAPES = ((64, 256), (48, 96), (33, 64), (8, 32))
"""[out, in]: several groups, few outputs, an odd number of them, and a single group."""


def int8_weight(shape: tuple[int, int], group: int, dtype: torch.dtype, generator: torch.Generator) -> Int8Weight:
    """Groups of very different size: each needs its own scale."""
    data = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    groups = -(-shape[1] // group)
    scale = (0.5 + torch.rand(shape[0], groups, generator=generator)) * shape[1] ** -0.5 / 73
    return Int8Weight(data, scale, group, dtype)


def int4_weight(shape: tuple[int, int], group: int, dtype: torch.dtype, generator: torch.Generator) -> Int4Weight:
    groups = -(-shape[1] // group)
    data = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scale = (0.5 + torch.rand(shape[0], groups, generator=generator)) * shape[1] ** -0.5 / 4.6
    zero = torch.randint(4, 12, (shape[0], groups), generator=generator).float()
    return Int4Weight(data, scale, zero, group, dtype)


def fp8_weight(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Fp8Weight:
    data = torch.randn(shape, generator=generator).mul(30).to(torch.float8_e4m3fn)
    return Fp8Weight(data, (0.5 + torch.rand(shape[0], generator=generator)) * shape[1] ** -0.5 / 30, dtype)


def exact_rows(weight: Weight) -> Tensor:
    """[out, in] float64 by the definition, an element at a time."""
    if isinstance(weight, Fp8Weight):
        return weight.data.double() * weight.scale.double()[:, None]
    assert isinstance(weight, (Int8Weight, Int4Weight))
    group = torch.arange(weight.shape[1]) // weight.group
    zero = weight.zero.double()[:, group] if isinstance(weight, Int4Weight) else 0.0
    return (weight.data.double() - zero) * weight.scale.double()[:, group]


def on_device(weight: Weight, backend: Backend) -> Weight:
    """With every tensor of it uploaded."""
    tensors: dict[str, Any] = {}
    for field in fields(weight):
        if isinstance(value := getattr(weight, field.name), Tensor):
            tensors[field.name] = backend.memory.upload(value)
    return replace(weight, **tensors)


def rounding(weight: Weight, absolute: float) -> float:
    """What a format allows beside a dtype's own error: rows of numbers near 1 may be rounded as the weights are."""
    if isinstance(weight, Fp8Weight):
        return ROUNDED_FP8
    whole_rows = isinstance(weight, Int8Weight) and weight.group >= weight.shape[1]
    return ROUNDED if whole_rows or isinstance(weight, Int4Weight) else absolute


def check_quantised(backend: Backend, dtype: str, rows: int, biased: bool) -> None:
    """Both formats in several shapes and groups; tolerances grow by the rounding that the format allows."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(rows)
    relative, absolute = TOLERANCE[dtype]
    for shape in SHAPES:
        x = torch.randn(rows, shape[1], generator=generator).to(kind)
        bias = torch.randn(shape[0], generator=generator).to(kind) if biased else None
        weights: list[Weight] = [int8_weight(shape, group, kind, generator) for group in (shape[1], 16, 32)]
        weights += [int4_weight(shape, group, kind, generator) for group in (16, 32, 64, 128)]
        weights.append(fp8_weight(shape, kind, generator))
        for weight in weights:
            handle = backend.ops.pack(on_device(weight, backend))
            upload = backend.memory.upload
            got = backend.ops.linear(upload(x), handle, None if bias is None else upload(bias))
            exact = x.double() @ exact_rows(weight).T
            exact = exact if bias is None else exact + bias.double()
            what = f"{type(weight).__name__} {shape}, group {getattr(weight, 'group', 0)}, {rows} rows, {dtype}"
            assert got.dtype == kind, f"{what}: result is {got.dtype}"
            assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}"
            allowed = absolute + relative * exact.abs() + rounding(weight, absolute)
            error = (got.cpu().double() - exact).abs()
            assert bool((error <= allowed).all()), f"{what}: off by {float(error.max()) if rows else 0:.3g}"
