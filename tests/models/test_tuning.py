"""Scales tuned after calibration: answers nearer to the dense model's, the same each time, written as found."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from anycore.cli.convert import words, write_extras
from anycore.contract.backend import Backend
from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight
from anycore.models import loader
from anycore.models.checkpoint import open_checkpoint
from anycore.models.convert.calibration import HostMemory, batch_of, calibrate
from anycore.models.convert.products import Held, Observer
from anycore.models.convert.tuning import Tuned
from anycore.models.convert.writer import Conversion, convert, wanted_formats
from anycore.models.decoder import Decoder
from anycore.models.parameters import canonical
from anycore.models.quantised.rounding import quantise
from anycore.models.source import locate
from anycore.models.spec import read_spec

TEXT = " ".join(tiny.CORPUS * 2)


def folder_of(family: str, folder: Path) -> Path:
    return tiny.tiny_lm(folder, family=family, layers=1, tied=family != "qwen2")


def steps(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("anycore.models.convert.tuning.STEPS", count)
    monkeypatch.setattr("anycore.models.convert.tuning.RATE", 0.01)  # a tiny random model is soon where it can be


@torch.no_grad()
def answers(folder: Path) -> Tensor:
    """[T, V]: log probabilities of what comes next."""
    source, cpu = locate(str(folder)), torch.device("cpu")
    model = loader.load(source, read_spec(source), Backend(cpu, HostMemory(cpu), Observer()), "float32")
    assert isinstance(model, Decoder)
    rows = [model.forward(batch_of(model.spec, ids)) for ids in words(source, TEXT)]
    return model.logits(torch.cat(rows)).log_softmax(-1)


def divergence(found: Tensor, exact: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize(("family", "tables"), [("llama", False), ("qwen2", True), ("gemma3", True)])
def test_answers_come_nearer(family: str, tables: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than by calibration alone, and that nearer than by rounding to the nearest; whichever is rounded."""
    folder = folder_of(family, tmp_path / "m")
    for name, text, count in (("nearest", None, 0), ("layers", TEXT, 0), ("tuned", TEXT, 6)):
        steps(monkeypatch, count)
        asked = Conversion(quantization="w4a16", calibration=text, tables=tables)
        convert(str(folder), tmp_path / name, asked, words, write_extras)
    exact = answers(folder)
    nearest, layers, tuned = (divergence(answers(tmp_path / name), exact) for name in ("nearest", "layers", "tuned"))
    assert tuned < 0.95 * layers < 0.95 * nearest


def test_what_is_written_is_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number by number, and the same each time; only scales are others than before, also of the table and of what a
    narrow model has in 8 bits: the values beside queries and keys of 4, and the last layer's down_proj."""
    monkeypatch.setattr("anycore.models.convert.writer.MANY_LAYERS", 1)
    folder = folder_of("gemma3", tmp_path / "m")
    source = locate(str(folder))
    spec = read_spec(source)
    formats = wanted_formats(spec, Conversion(quantization="w4a16", tables=True))
    steps(monkeypatch, 0)
    plain = calibrate(source, spec, words(source, TEXT), formats)
    steps(monkeypatch, 3)
    found = calibrate(source, spec, words(source, TEXT), formats)
    asked = Conversion(quantization="w4a16", calibration=TEXT, tables=True)
    convert(str(folder), tmp_path / "out", asked, words, write_extras)
    read = {canonical(name): entry for name, entry in open_checkpoint(locate(str(tmp_path / "out"))).tensors()}
    assert len(found.weights) == len(formats) == 7 + 1
    for name, weight in found.weights.items():
        entry, before = read[name], plain.weights[name]
        eight = name in ("layers.0.self_attn.v_proj.weight", "layers.0.mlp.down_proj.weight")
        assert isinstance(weight, Int8Weight if eight else Int4Weight)
        assert type(entry) is type(weight) is type(before)
        assert isinstance(before, (Int4Weight, Int8Weight))
        assert torch.equal(entry.dense(), weight.dense()), name
        assert torch.equal(weight.data, before.data)
        if isinstance(weight, Int4Weight) and isinstance(before, Int4Weight):
            assert torch.equal(weight.zero, before.zero)
        change = weight.scale / before.scale - 1
        assert 0.003 < float(change.abs().max()) < 0.06, name


def test_a_changed_scale_is_that_of_the_matrix() -> None:
    """The gradient of a product's square by each scale, and what the matrix is after."""
    start = quantise(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), Format("int4", 32))
    assert isinstance(start, Int4Weight)
    held = Held(start.dense())
    tuned = Tuned(held, [(start, (("some", 8),))])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    (x @ held.weight.T).pow(2).sum().backward()
    assert held.weight.grad is None
    shares = torch.ones(8, 2, requires_grad=True)
    (x @ (start.dense().view(8, 2, 32) * shares[..., None]).view(8, 64).T).pow(2).sum().backward()
    assert tuned.changes.grad is not None
    assert shares.grad is not None
    torch.testing.assert_close(tuned.changes.grad, shares.grad)
    tuned.changes += 0.25
    torch.testing.assert_close(tuned.dense(), start.dense() * 1.25, rtol=0.005, atol=0)
