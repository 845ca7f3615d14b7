"""Matrices that the CPU's kernels round to int8 as a model is loaded: bit for bit what the loader's operations give."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore import plugins
from anycore.config import ModelConfig
from anycore.contract.formats import Format
from anycore.contract.ops import Ops
from anycore.contract.weights import Int8Weight
from anycore.engine.launch import build, prepare
from anycore.models import loader
from anycore.models.quantised.rounding import quantise
from anycore_cpu.kernel_ops import KernelOps


def matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of many sizes, one of zeros, and halves of steps, which go to the even number."""
    generator = torch.Generator().manual_seed(rows)
    made = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    made[1] = 0
    made[2] = torch.arange(columns) % 16 + 0.5
    made[2, 0] = 127
    return made.to(dtype)


def same(found: Int8Weight | None, wanted: object) -> bool:
    assert found is not None
    assert isinstance(wanted, Int8Weight)
    assert (found.group, found.dtype) == (wanted.group, wanted.dtype)
    return torch.equal(found.data, wanted.data) and torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_the_same_bits_as_the_loader(level: str, dtype: torch.dtype) -> None:
    ops = KernelOps(kernels_of(level))
    for rows, columns in ((3, 5), (40, 70), (129, 256)):
        weight = matrix(rows, columns, dtype)
        for group in (0, 16, 32, columns):
            wanted = Format("int8", group)
            assert same(ops.quantise(weight, wanted), quantise(weight, wanted)), f"{rows} x {columns} by {group}"


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_kept_as_the_loader_does(broken: float) -> None:
    weight = matrix(5, 70, torch.bfloat16)
    weight[3, 69] = broken
    ops = KernelOps(kernels_of(LEVELS[0]))
    for group in (0, 32):
        assert same(ops.quantise(weight, Format("int8", group)), quantise(weight, Format("int8", group)))


def test_columns_of_a_larger_matrix() -> None:
    weight = matrix(40, 140, torch.bfloat16)[:, ::2]
    assert same(KernelOps(kernels_of(LEVELS[0])).quantise(weight, Format("int8")), quantise(weight, Format("int8")))


def test_other_formats_are_left_to_the_loader() -> None:
    ops = KernelOps(kernels_of(LEVELS[0]))
    weight = matrix(4, 64, torch.bfloat16)
    assert ops.quantise(weight, Format("int4", 32)) is None
    assert ops.quantise(weight, Format("fp8")) is None
    assert ops.quantise(weight.half(), Format("int8")) is None
    assert Ops().quantise(weight, Format("int8")) is None


def test_a_model_is_loaded_without_the_loaders_operations(t_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("rounded by torch's operations")

    monkeypatch.setattr(loader, "quantise", refuse)
    kernels_of(LEVELS[0])
    config = ModelConfig(
        model=str(t_lm),
        backend="cpu",
        dtype="bfloat16",
        quantization="w8a8",
        max_model_len=64,
        kv_cache_memory=1 << 24,
    )
    assert build(prepare(config, plugins.load())).card["quantization"] == "w8a8"
