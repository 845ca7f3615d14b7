"""The kit's cases of whole models with quantised weights: right backends pass, wrong ones are found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packing import SmallOps, keeping
from torch import Tensor

from anycore.contract import endtoend_weights
from anycore.contract.declare import BackendSpec
from anycore.contract.formats import SCHEMES
from anycore.contract.ops import Ops
from anycore.contract.testing import BackendConformance, held_cases
from anycore.contract.weights import DenseWeight, Fp8Weight, Weight


class Shuffled(SmallOps):
    """Gives each row of a quantised matrix the scale of its neighbour."""

    def pack(self, weight: Weight) -> Any:
        if isinstance(weight, DenseWeight):
            return super().pack(weight)
        return super().pack(replace(weight, scale=weight.scale.roll(1, 0)))


class Dense(SmallOps):
    """Makes weights dense, though it claims to keep them."""

    def pack(self, weight: Weight) -> Any:
        return weight.dense()


class Rounding(SmallOps):
    """Right, and rounds what quantised weights multiply as coarsely as is allowed: a scale a row."""

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if isinstance(handle, Tensor):
            return super().linear(x, handle, bias)
        kind, largest = (torch.float8_e4m3fn, 448) if isinstance(handle, Fp8Weight) else (torch.int8, 127)
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-9) / largest
        steps = x / scale if kind.is_floating_point else (x / scale).round()
        return super().linear((steps.to(kind).float() * scale).to(x.dtype), handle, bias)


SIZES = [("w8a8", 16), ("w4a16", 64), ("gguf", 128), ("fp8", 16), ("fp8", 64), ("fp8", 128)]
"""Schemes and head sizes that hold the kit's tolerances: fp8 has its own, the others share theirs."""


def use(monkeypatch: pytest.MonkeyPatch, ops: type[Ops]) -> None:
    loaded = keeping(ops)
    monkeypatch.setattr(endtoend_weights, "load", lambda: loaded)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_right_backend_passes(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SmallOps)
    endtoend_weights.check_generate("cpu", "float32", scheme, tmp_path / "tied", 64, tied=True)
    endtoend_weights.check_generate("cpu", "float32", scheme, tmp_path / "untied", 16, tied=False)
    endtoend_weights.check_embed("cpu", "float32", scheme, tmp_path / "embed", 64)
    endtoend_weights.check_rerank("cpu", "float32", scheme, tmp_path / "rerank", 16)


@pytest.mark.parametrize(("scheme", "head_dim"), SIZES)
def test_a_backend_may_round_rows(scheme: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Rounding)
    endtoend_weights.check_generate("cpu", "bfloat16", scheme, tmp_path / "model", head_dim, tied=False)
    endtoend_weights.check_embed("cpu", "bfloat16", scheme, tmp_path / "embed", head_dim)
    endtoend_weights.check_rerank("cpu", "bfloat16", scheme, tmp_path / "rerank", head_dim)


@pytest.mark.parametrize(("scheme", "head_dim"), SIZES)
def test_wrong_scales_are_found(scheme: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Shuffled)
    with pytest.raises(AssertionError, match="below the best"):
        endtoend_weights.check_generate("cpu", "float32", scheme, tmp_path / "m", head_dim, tied=False)
    with pytest.raises(AssertionError, match="has cosine"):
        endtoend_weights.check_embed("cpu", "float32", scheme, tmp_path / "embed", head_dim)
    with pytest.raises(AssertionError, match="are off by"):
        endtoend_weights.check_rerank("cpu", "float32", scheme, tmp_path / "rerank", head_dim)


def test_dense_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Dense)
    with pytest.raises(AssertionError, match="planned were"):
        endtoend_weights.check_generate("cpu", "bfloat16", "w8a8", tmp_path / "m", 64, tied=True)


def test_cases_are_what_rows_claim() -> None:
    class Claims(BackendConformance):
        backend = "cpu"

        @classmethod
        def spec(cls) -> BackendSpec:
            return keeping(schemes=("w8a8", "fp8")).backends[0]

    assert set(held_cases(Claims.claims())) >= {("w8a8", "float32"), ("fp8", "float32"), ("w8a8", "bfloat16")}
    assert not list(held_cases([replace(row, schemes=()) for row in Claims.claims()]))
