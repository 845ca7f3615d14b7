"""Weights that come quantised: kept where a backend has their scheme, made dense or refused where it has not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engines import run
from gguf import GGMLQuantizationType
from packing import KeepingOps, SmallOps, keeping
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf

from anycore.config import ModelConfig
from anycore.contract.formats import Format
from anycore.engine.launch import Prepared, build, prepare
from anycore.errors import ConfigError, Unsupported
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import Quantization
from anycore.plugins import Plugins

PROMPTS = [[7, 20, 31, 44, 5, 90], [11] * 17, [3]]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    tiny.tiny_lm(folder, layers=2)
    return write_gguf(folder, folder / "m.gguf", GGMLQuantizationType.Q8_0)


def ready(model: Path, loaded: Plugins, strict: bool = False, **settings: Any) -> Prepared:
    settings = {"dtype": "float32", "kv_cache_memory": 2**22, **settings}
    return prepare(ModelConfig(model=str(model), backend="cpu", **settings), loaded, strict=strict)


def decided(prepared: Prepared) -> tuple[str, str, bool]:
    found = next(decision for decision in prepared.decisions if decision.name == "quantization")
    return str(found.value), found.by, found.adjusted


def tokens(prepared: Prepared) -> list[list[int]]:
    return [output.tokens for output in run(build(prepared), PROMPTS)]


def test_blocks_are_kept_where_the_backend_has_them(blocks: Path) -> None:
    kept, dense = ready(blocks, keeping(SmallOps), strict=True), ready(blocks, keeping(SmallOps), quantization="none")
    assert decided(kept) == ("gguf", "model", False)
    assert decided(dense) == ("none", "flag", False)
    assert kept.plan is not None
    assert dense.plan is not None
    assert kept.plan.weights < 0.29 * dense.plan.weights
    engine = build(kept)
    assert engine.card["memory_measured"]["weights"] == pytest.approx(kept.plan.weights, rel=0.1)  # scales are float32
    assert [output.tokens for output in run(engine, PROMPTS)] == tokens(dense)


def test_blocks_are_made_dense_elsewhere_and_strict_refuses(blocks: Path) -> None:
    loaded = keeping(SmallOps, schemes=())
    assert decided(ready(blocks, loaded)) == ("none", "backend", True)
    with pytest.raises(ConfigError, match="gguf weights of this kind: they are made dense"):
        ready(blocks, loaded, strict=True)


def test_blocks_are_rounded_again_if_asked_for(blocks: Path) -> None:
    prepared = ready(blocks, keeping(), quantization="w4a16")
    assert decided(prepared) == ("w4a16", "flag", False)
    ops = build(prepared).runner.backend.ops
    assert isinstance(ops, KeepingOps)
    assert {(type(weight).__name__, weight.group) for weight in ops.packed} == {("Int4Weight", 32)}


def test_others_are_not_made_dense_unasked(t_lm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "awq"
    folder.mkdir()
    for path in t_lm.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((t_lm / "config.json").read_text())
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert decided(ready(folder, keeping())) == ("w4a16", "model", False)
    assert decided(ready(folder, keeping(schemes=()), quantization="none")) == ("none", "flag", False)
    with pytest.raises(Unsupported, match=r"w4a16 are not among w8a8[\s\S]*Would do instead: --quantization none"):
        ready(folder, keeping(schemes=("w8a8",)))


def test_a_fused_matrix_of_several_formats_is_several_products(tmp_path: Path) -> None:
    """As in files that keep values more exactly than queries and keys."""
    folder = tiny.tiny_lm(tmp_path / "m", layers=1)
    prepared = ready(folder, keeping(), quantization="w8a8")
    layer = "layers.0.self_attn"
    formats = {
        f"{layer}.q_proj.weight": Format("int4", 32),
        f"{layer}.k_proj.weight": Format("int4", 32),
        f"{layer}.v_proj.weight": Format("int8", 16),
        "layers.0.mlp.up_proj.weight": Format("fp8"),
    }
    prepared = replace(prepared, wish=replace(prepared.wish, quantization=Quantization("gguf", formats)))
    engine = build(prepared)
    assert sorted(weight.shape[0] for weight in engine.runner.backend.ops.packed) == [128, 256, 256 + 128]
    reference = tiny.tiny_lm(tmp_path / "dense", layers=1)
    tensors = load_file(reference / "model.safetensors")
    for name, kind in formats.items():
        tensors[f"model.{name}"] = quantise(tensors[f"model.{name}"], kind).dense()
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    assert [output.tokens for output in run(engine, PROMPTS)] == tokens(ready(reference, keeping()))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(5, 96), (3, 40), (1, 1)])
@pytest.mark.parametrize("kind", [Format("int8"), Format("int8", 32), Format("int4", 32), Format("fp8")])
def test_rounding_is_to_the_nearest(kind: Format, shape: tuple[int, int], symmetric: bool) -> None:
    weight = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1))
        * torch.tensor([1e-3, 1.0, 7.0, 0.0, 50.0])[: shape[0], None]
    )
    found = quantise(weight, kind, symmetric)
    off = (found.dense() - weight).abs()
    group = kind.group or shape[1]
    padded = torch.nn.functional.pad(weight, (0, -shape[1] % group)).view(shape[0], -1, group)
    reach = padded.abs().amax(-1).repeat_interleave(group, 1)[:, : shape[1]]
    if kind.kind == "fp8":
        assert bool((off <= torch.maximum(weight.abs() / 16, reach / 448 / 512) * 1.0001).all())
        return
    span = (padded.amax(-1).clamp(min=0) - padded.amin(-1).clamp(max=0)).repeat_interleave(group, 1)[:, : shape[1]]
    step = reach / 127 if kind.kind == "int8" else reach / 7.5 if symmetric else span / 15
    most = 1.0 if kind.kind == "int4" else 0.5  # the outermost of 16 numbers, where zero points or signs are rounded
    assert bool((off <= step * most * 1.01 + step / 256 * 16).all())
