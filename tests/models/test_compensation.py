"""Rounding with a text: scales that change no result, errors that are made up for, and a folder that holds the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from reference import gap
from torch import Tensor

from anycore.cli.convert import words
from anycore.cli.main import main
from anycore.contract.backend import Backend
from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight
from anycore.errors import ConfigError
from anycore.models import loader
from anycore.models.checkpoint import open_checkpoint
from anycore.models.convert.calibration import Calibration, HostMemory, Walk, calibrate
from anycore.models.convert.compensation import clipped, compensated, cut, fitted
from anycore.models.convert.products import Held, Inputs, Observer, Product, eight_bits, products
from anycore.models.convert.scaling import fold, search
from anycore.models.decoder import Decoder
from anycore.models.encoder import Encoder
from anycore.models.parameters import canonical, parameters
from anycore.models.quantised.rounding import quantise
from anycore.models.source import Source, locate
from anycore.models.spec import read_spec

TEXT = " ".join(tiny.CORPUS * 6)
FOUR, EIGHT = Format("int4", 32), Format("int8", 128)


def correlated(rows: int = 512, width: int = 128) -> Tensor:
    """Inputs that mostly lie in a few directions, as hidden states do."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(rows, 12, generator=generator) @ torch.randn(12, width, generator=generator)
    return few + 0.3 * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize(("wanted", "kind"), [(FOUR, Int4Weight), (EIGHT, Int8Weight)], ids=["int4", "int8"])
def test_compensation_beats_rounding_to_the_nearest(wanted: Format, kind: type) -> None:
    """In the product of other inputs of the same kind than those it was told of; no number leaves its range."""
    inputs = correlated(1024)
    told, others = inputs[:512], inputs[512:]
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1))
    found = compensated(weight, told.T @ told / len(told), wanted)
    assert isinstance(found, kind)
    assert found.data.dtype == quantise(weight, wanted).data.dtype
    assert int(found.data.max()) <= {"int4": 15, "int8": 127}[wanted.kind]

    def error(rounded: Tensor) -> float:
        return float((others @ (rounded - weight).T).pow(2).mean())

    nearest = error(quantise(weight, wanted).dense())
    assert error(found.dense()) < 0.5 * nearest
    assert error(compensated(weight, torch.zeros(128, 128), wanted).dense()) < 1.2 * nearest  # inputs that never came


def test_rows_are_rounded_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    inputs = correlated(width=64)
    squares = inputs.T @ inputs / len(inputs)
    whole = compensated(weight, squares, FOUR)
    monkeypatch.setattr("anycore.models.convert.compensation.ROWS", 16)
    assert torch.equal(compensated(weight, squares, FOUR).dense(), whole.dense())
    parts = cut(whole, (("a", 30), ("b", 10)))
    assert torch.equal(torch.cat([parts["a"].dense(), parts["b"].dense()]), whole.dense())


def test_a_group_leaves_out_what_does_not_matter() -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 8
    importance = torch.ones(128)
    importance[5] = 1e-6
    for wanted, most in ((FOUR, 0.9), (EIGHT, 0.95)):
        errors = [
            float(((rounded.dense() - weight).pow(2) * importance).sum())
            for rounded in (clipped(weight, wanted, importance), quantise(weight, wanted))
        ]
        assert errors[0] < most * errors[1]


def test_scales_are_fitted_to_whole_numbers() -> None:
    """All of a row at once: nearer than as they were, to a scale's eight bits the best there are, and zeros stay."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(40, 128, generator=generator)
    weight[5, :32] = 0
    inputs = correlated()
    squares = inputs.T @ inputs / len(inputs)
    start = quantise(weight, FOUR)
    assert isinstance(start, Int4Weight)

    def error(scale: Tensor) -> Tensor:
        rest = replace(start, scale=scale).dense() - weight
        return ((rest @ squares) * rest).sum(-1)

    found = fitted(start, weight, squares).scale
    assert float(error(found).sum()) < 0.8 * float(error(start.scale).sum())
    assert float(found[5, 0]) == float(start.scale[5, 0])
    for share in (0.97, 1.03):
        for group in range(4):
            moved = found.clone()
            moved[:, group] *= share
            assert float(error(moved).sum()) > float(error(found).sum())


def observed(folder: Path) -> Decoder | Encoder:
    """A model that notes what its matrices multiply, and rounds it where it is told to."""
    source, cpu = locate(str(folder)), torch.device("cpu")
    model = loader.load(source, read_spec(source), Backend(cpu, HostMemory(cpu), Observer()), "float32")
    assert isinstance(model, (Decoder, Encoder))
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "bert"])
def test_scales_change_no_result(family: str, tmp_path: Path) -> None:
    """Scaled in one matrix and unscaled in what makes its inputs, a layer's result is the same."""
    folder = tiny.tiny_bert(tmp_path) if family == "bert" else tiny.tiny_lm(tmp_path, family=family, layers=2)
    source = locate(str(folder))
    spec = read_spec(source)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        model = observed(folder)
        walk = Walk(model, spec, words(source, TEXT)[:2])
        before = [x for x, _ in walk.layer(0)]
        found = [*products(model, spec, 0)]
        assert sum(rows for p in found for _, rows in p.parts) == sum(
            p.shape[0] for p in parameters(spec) if p.packed and ".0." in p.name
        )
        scaled = [product for product in found if product.makers]
        assert len(scaled) == (1 if family == "bert" else 4)
        for product in scaled:
            fold(product, torch.rand(len(product.makers[0][1]), generator=generator) + 0.5)
        after = [x for x, _ in walk.layer(0)]
    assert all(gap(one, other) < 2e-5 for one, other in zip(after, before, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_an_outlier_is_scaled_out_of_what_is_rounded() -> None:
    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(3))
    rows[:, 7] *= 60
    held = Held(torch.randn(64, 128, generator=torch.Generator().manual_seed(4)))
    norm = torch.ones(128)
    product = Product((("w", 64),), held, (("norm", norm),))
    inputs = Inputs(128, every=1)
    inputs.add(rows)
    exact = rows @ held.weight.T
    plain = (eight_bits(rows, 128) @ held.weight.T - exact).pow(2).mean()
    best = search(product, inputs, EIGHT)
    assert best is not None
    fold(product, best)
    after = (eight_bits(rows * norm, 128) @ quantise(held.weight, EIGHT).dense().T - exact).pow(2).mean()
    assert float(after) < 0.1 * float(plain)


def formats_of(folder: Path) -> dict[str, Format]:
    spec = read_spec(Source("out", folder))
    assert spec.stored is not None
    return dict(spec.stored.formats)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("kind", ["gemma3", "bert"])
def test_what_is_written_is_what_was_found(
    kind: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds the calibrated weights, number by number, and they are nearer than rounding to the nearest."""
    monkeypatch.setattr("anycore.models.convert.tuning.STEPS", 0)  # which draws answers nearer, not hidden states
    folder = tiny.tiny_bert(tmp_path / "m") if kind == "bert" else tiny.tiny_lm(
        tmp_path / "m", family="gemma3", layers=2, tied=True, hidden=128
    )  # fmt: skip
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    flags = ["--quantization", scheme, *(["--tables"] if kind == "gemma3" else [])]
    assert main(["convert", str(folder), str(tmp_path / "out"), *flags, "--calibration", str(text)]) == 0
    assert main(["convert", str(folder), str(tmp_path / "plain"), *flags]) == 0
    source = locate(str(folder))
    spec = read_spec(source)
    wanted = {
        name: Format(held.kind, held.group or parameter.shape[1])
        for parameter in parameters(spec)
        for name, _ in parameter.parts
        if (held := formats_of(tmp_path / "out").get(name)) is not None
    }
    found = calibrate(source, spec, words(source, TEXT), wanted)
    assert isinstance(found, Calibration)
    read = {canonical(name): entry for name, entry in open_checkpoint(locate(str(tmp_path / "out"))).tensors()}
    assert len(found.weights) >= (3 * 6 if kind == "bert" else 2 * 7)
    for name, weight in found.weights.items():
        entry = read[name]
        assert isinstance(entry, (Int4Weight, Int8Weight))
        assert torch.equal(entry.dense(), weight.dense()), name
    exact = hidden(folder, False)
    near, nearest = (hidden(tmp_path / name, scheme == "w8a8") for name in ("out", "plain"))
    most = 1.1 if scheme == "w8a8" else 0.95  # random weights make no inputs larger than others
    assert float((near - exact).norm()) < most * float((nearest - exact).norm())


@torch.inference_mode()
def hidden(folder: Path, rounds: bool, group: int = 0) -> Tensor:
    """After the last layer, of a text that calibration was not told of; `rounds`: what matrices multiply, too, by
    groups of a row if they are given.
    """
    source = locate(str(folder))
    spec = read_spec(source)
    model = observed(folder)
    walk = Walk(model, spec, words(source, "Sphinx of black quartz, judge my vow! " * 8))
    for index in range(spec.layers):
        for product in products(model, spec, index):
            product.held.rounds = (group or product.held.weight.shape[1]) if rounds else 0
        walk.go_on(index)
    return torch.cat([x if residual is None else x + residual for x, residual in walk.states])


def test_a_head_of_eight_bits_is_multiplied_as_it_is(tmp_path: Path) -> None:
    """It has a group of its own in config.json, without activations, and scales a group of 32 inputs."""
    folder = tiny.tiny_lm(tmp_path / "m", layers=2, hidden=128, tied=True)
    assert main(["convert", str(folder), str(tmp_path / "out"), "--quantization", "w8a8", "--tables"]) == 0
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear"]
    assert groups["group_1"]["targets"] == ["re:.*embed_tokens$"]
    assert groups["group_1"]["input_activations"] is None
    formats = formats_of(tmp_path / "out")
    assert formats.pop("embed_tokens.weight") == Format("int8", 32)
    assert set(formats.values()) == {Format("int8")}
    table = {canonical(n): entry for n, entry in open_checkpoint(locate(str(tmp_path / "out"))).tensors()}
    assert isinstance(table["embed_tokens.weight"], Int8Weight)
    assert gap(table["embed_tokens.weight"].dense(), loader_table(folder)) < 0.02


def test_narrow_models_of_many_layers_are_written_in_groups(tmp_path: Path) -> None:
    """All of w8a8 by groups of 32 inputs if tables are quantised, too: nearer than a scale a row."""
    folder = tiny.tiny_lm(tmp_path / "m", layers=16)
    flags = ["--quantization", "w8a8"]
    assert main(["convert", str(folder), str(tmp_path / "groups"), *flags, "--tables"]) == 0
    assert main(["convert", str(folder), str(tmp_path / "rows"), *flags]) == 0
    found = formats_of(tmp_path / "groups")
    assert (len(found), set(found.values())) == (16 * 7 + 2, {Format("int8", 32)})
    assert set(formats_of(tmp_path / "rows").values()) == {Format("int8")}
    exact = hidden(folder, False)
    groups, rows = hidden(tmp_path / "groups", True, 32), hidden(tmp_path / "rows", True)
    assert float((groups - exact).norm()) < float((rows - exact).norm())


def test_four_bits_of_narrow_models_of_many_layers(tmp_path: Path) -> None:
    """With tables, values and the last layer's down_proj have eight, unless that is not wanted or groups are others."""
    folder = tiny.tiny_lm(tmp_path / "m", layers=16)
    flags = ["convert", str(folder), str(tmp_path / "out"), "--quantization", "w4a16"]
    expected = {f"layers.{layer}.self_attn.v_proj.weight" for layer in range(16)} | {"layers.15.mlp.down_proj.weight"}
    for more, eight in ((["--tables"], expected), ([], set()), (["--tables", "--keep-dense", "none"], set())):
        assert main([*flags, *more]) == 0
        found = formats_of(tmp_path / "out")
        assert {name for name, wanted in found.items() if wanted == Format("int8", 32)} == eight
        assert {wanted for name, wanted in found.items() if name not in eight} == {FOUR}
        shutil.rmtree(tmp_path / "out")
    assert main([*flags, "--tables", "--group", "64"]) == 0
    assert set(formats_of(tmp_path / "out").values()) == {Format("int4", 64)}


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_an_encoders_table_is_written_quantised(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside matrices of 8 bits in groups, which those that 4 bits hurt most have, too."""
    monkeypatch.setattr("anycore.models.quantization.ENCODER_LAYERS", 1)
    folder = tiny.tiny_bert(tmp_path / "m")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--quantization", scheme, "--tables"]) == 0
    found = formats_of(tmp_path / "out")
    assert found["embeddings.word_embeddings.weight"] == Format("int8" if scheme == "w8a8" else "int4", 32)
    assert found["encoder.layer.0.intermediate.dense.weight"] == Format("int8", 32)
    assert found["encoder.layer.0.output.dense.weight"] == Format("int8" if scheme == "w8a8" else "int4", 32)
    groups = dict(open_checkpoint(locate(str(tmp_path / "out"))).tensors())
    assert isinstance(groups["encoder.layer.0.attention.self.key.weight"], Int8Weight)


def test_calibration_rounds_what_groups_multiply_by_groups(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, layers=1, hidden=128)
    source = locate(str(folder))
    spec = read_spec(source)
    wanted = {n: Format("int8", 32) for p in parameters(spec) if p.packed and not p.exact for n, _ in p.parts}
    found = calibrate(source, spec, words(source, TEXT), wanted)
    assert {weight.group for weight in found.weights.values() if isinstance(weight, Int8Weight)} == {32}
    rows = torch.tensor([[127.0, 0.4, 1.0, 0.004]])
    assert eight_bits(rows, 4).tolist() == [[127.0, 0.0, 1.0, 0.0]]
    assert gap(eight_bits(rows, 2), torch.tensor([[127.0, 0.0, 1.0, 1 / 127 * round(0.004 * 127)]])) < 1e-6


def loader_table(folder: Path) -> Tensor:
    table = {canonical(name): entry for name, entry in open_checkpoint(locate(str(folder))).tensors()}
    found = table["embed_tokens.weight"]
    assert isinstance(found, Tensor)
    return found


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, layers=1)
    source = locate(str(folder))
    with pytest.raises(ConfigError, match="the text has 7 tokens, 512 are needed"):
        calibrate(source, read_spec(source), [[5] * 7], {})
