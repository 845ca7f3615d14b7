"""Quantised weights of several ranks: each reads its part of the files only, and holds what it would of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import numpy as np
import packing
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType
from models import test_quantised_checkpoints as written
from parallel import inprocess
from tiny_gguf import write_gguf

from anycore.errors import Unsupported, WeightsError
from anycore.models.checkpoint import Entry, Ordered, open_checkpoint
from anycore.models.cutting import cut_out, narrow
from anycore.models.gathering import tensors
from anycore.models.gguf.weights import GgufCheckpoint
from anycore.models.parallel import Cut, cuts, shard
from anycore.models.parameters import canonical
from anycore.models.quantised import slices
from anycore.models.source import Source, locate
from anycore.models.spec import read_spec

NAME = "layers.0.mlp.up_proj.weight"
LAYER, ROWS, COLUMNS = written.LAYER, written.ROWS, written.COLUMNS
Stored = tuple[dict[str, Any], written.Tensors]


def awq() -> Stored:
    return written.AWQ, written.awq_tensors()[0]


def gptq(bits: int, group: int = 32) -> Callable[[], Stored]:
    return lambda: (written.gptq(bits, group, 1), written.gptq_tensors(bits, group, 1)[0])


def packed(bits: int) -> Callable[[], Stored]:
    def made() -> Stored:
        numbers, zero, scale = written.random_numbers(bits, 32)
        parts = {
            "weight_packed": written.packed_rows(numbers, bits),
            "weight_scale": torch.tensor(scale, dtype=torch.float16),
            "weight_zero_point": written.packed_rows(zero.T, bits).T,
            "weight_shape": torch.tensor([ROWS, COLUMNS]),
        }
        settings = written.compressed(bits, group=32, symmetric=False)
        return settings, {f"{LAYER}.{ending}": tensor for ending, tensor in parts.items()}

    return made


def compressed_bytes() -> Stored:
    matrix = np.random.default_rng(1).normal(size=(ROWS, COLUMNS))
    return written.compressed(8) | {"format": "int-quantized"}, written.compressed_layer(LAYER, matrix, 0)


def fp8(block: bool) -> Callable[[], Stored]:
    def made() -> Stored:
        scales = torch.rand((2, 2) if block else (ROWS, 1)) + 0.5
        ending = "weight_scale_inv" if block else "weight_scale"
        settings = {"quant_method": "fp8"} | ({"weight_block_size": [8, 32]} if block else {})
        return settings, {f"{LAYER}.weight": written.e4m3()[0], f"{LAYER}.{ending}": scales}

    return made


STORED: dict[str, Callable[[], Stored]] = {
    "awq": awq,
    "gptq of 3 bits": gptq(3),
    "gptq of 4 bits": gptq(4),
    "gptq of 8 bits, made dense": gptq(8),
    "packed, 4 bits": packed(4),
    "packed, 8 bits, made dense": packed(8),
    "int8": compressed_bytes,
    "fp8 by rows": fp8(block=False),
    "fp8 by blocks, made dense": fp8(block=True),
}


def read(source: Source, cut: Cut | None) -> tuple[Entry, bool]:
    """The matrix, or a part of it; and whether it was cut before it was unpacked."""
    checkpoint = open_checkpoint(source)
    left = narrow(checkpoint, {} if cut is None else {NAME: cut})
    entry = dict(checkpoint.tensors())[f"model.{NAME}"]
    if NAME in left:
        entry = cut_out(entry, left[NAME], False, NAME)
    elif cut is not None:
        assert checkpoint.shapes[f"model.{NAME}"] == (entry.weight if isinstance(entry, Ordered) else entry).shape
    return entry, NAME not in left


def check_equal(one: Entry, other: Entry) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor | Ordered):
        one, other = (x.weight.dense() if isinstance(x, Ordered) else x for x in (one, other))
        assert torch.equal(one, other)  # type: ignore[arg-type]
        return
    pairs = zip(tensors(one).values(), tensors(other).values(), strict=True)  # type: ignore[arg-type]
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the files that matrices are made of, from now on."""
    found: list[int] = []
    plain = slices.taken_of

    def counting(*arguments: Any) -> dict[str, torch.Tensor]:
        parts = plain(*arguments)
        found.append(sum(part.nbytes for part in parts.values()))
        return parts

    monkeypatch.setattr(slices, "taken_of", counting)
    return found


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", STORED)
def test_parts_are_those_of_the_whole_and_nothing_else_is_read(
    name: str, dim: int, tmp_path: Path, taken: list[int]
) -> None:
    settings, parts = STORED[name]()
    source = written.folder_of(tmp_path, settings, parts)
    whole, half = read(source, None)[0], (ROWS, COLUMNS)[dim] // 2
    shared = COLUMNS * 4 if dim == 0 else ROWS * 4  # an index of all inputs, or scales of all outputs
    total = sum(part.nbytes for ending, part in parts.items() if not ending.endswith(("g_idx", "weight_shape")))
    for start in (0, half):
        cut = Cut((ROWS, COLUMNS), dim, start, start + half)
        part, early = read(source, cut)
        check_equal(part, cut_out(whole, cut, False, NAME))
        if name == "gptq of 3 bits" and dim == 0:
            assert not early  # the zero points of eight outputs are no whole words
        else:
            assert early
            assert taken.pop() <= 0.5 * total + shared


def test_a_group_or_a_word_of_two_ranks_is_cut_when_it_is_unpacked(tmp_path: Path, taken: list[int]) -> None:
    settings, parts = awq()
    source = written.folder_of(tmp_path, settings, parts)
    whole = read(source, None)[0]
    for cut in (Cut((ROWS, COLUMNS), 1, 16, 48), Cut((ROWS, COLUMNS), 0, 4, 12)):
        if cut.dim:
            with pytest.raises(Unsupported, match="a scale for each 32 inputs"):
                read(source, cut)
        else:
            check_equal(read(source, cut)[0], cut_out(whole, cut, False, NAME))
    assert not taken


def test_the_order_of_activations_is_kept_by_rows_and_undone_by_columns(tmp_path: Path, taken: list[int]) -> None:
    index = np.random.default_rng(1).permutation(np.arange(COLUMNS) // 32)
    parts, _ = written.gptq_tensors(4, 32, 2, index)
    source = written.folder_of(tmp_path, written.gptq(4, 32, 2, desc_act=True), parts)
    whole = read(source, None)[0]
    rows, columns = Cut((ROWS, COLUMNS), 0, 8, 16), Cut((ROWS, COLUMNS), 1, 32, 64)
    part, early = read(source, rows)
    assert early
    assert isinstance(part, Ordered)
    check_equal(part, cut_out(whole, rows, True, NAME))
    part, early = read(source, columns)
    assert not early
    check_equal(part, cut_out(whole, columns, False, NAME))
    assert len(taken) == 1


def test_a_shape_that_is_written_is_held_against_the_whole(tmp_path: Path) -> None:
    settings, parts = packed(4)()
    source = written.folder_of(tmp_path, settings, parts | {f"{LAYER}.weight_shape": torch.tensor([8, COLUMNS])})
    with pytest.raises(WeightsError, match=r"weight_shape says \[8, 64\]"):
        read(source, Cut((ROWS, COLUMNS), 0, 0, 8))


# --- whole models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", written.MODELS)
def test_two_ranks_answer_as_one_does(
    method: str, tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files of each scheme, in float32: kept as they are, but for inputs in the order of activations."""
    settings, write, scheme = written.MODELS[method]
    folder = written.quantised_model(tmp_path, settings, write)
    kept = packing.keeping(packing.SmallOps)
    monkeypatch.setattr(engines, "LOADED", kept)
    monkeypatch.setattr(inprocess, "LOADED", kept)
    ask: dict[str, Any] = {"quantization": "none"} if method == "gptq" else {}
    one = engines.engine(folder, **ask)
    assert one.card["quantization"] == (None if ask else scheme)
    words = [[7, 9, 30, 200], list(range(5, 42))]
    wanted = engines.run(one, words)
    group = inprocess.Group(folder, 2, **ask)
    for found in group.run(lambda engine: engines.run(engine, words)):
        assert [output.tokens for output in found] == [output.tokens for output in wanted]
    spec = read_spec(locate(str(folder)))
    early = 3 if ask else 5  # of seven matrices of a layer: the one KV head is whole on both
    assert len(taken) == 2 * spec.layers * early


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_1", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_parts_of_a_gguf_file(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, whose order of heads is undone, and by blocks; each rank reads half of the matrices' bytes."""
    folder = tiny.tiny_lm(tmp_path / "hf", family=family, layers=1, head_dim=32)
    path = write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    read: list[int] = []
    raw = GgufCheckpoint._raw

    def counting(self: GgufCheckpoint, name: str) -> Any:
        read.append(raw(self, name).nbytes)
        return raw(self, name)

    monkeypatch.setattr(GgufCheckpoint, "_raw", counting)
    spec = read_spec(locate(str(path)))
    whole = dict(GgufCheckpoint(path).tensors())
    total, read[:] = sum(read), []
    for rank in range(2):
        wanted = cuts(shard(spec, rank, 2))
        checkpoint = GgufCheckpoint(path)
        assert not narrow(checkpoint, wanted)
        for name, entry in checkpoint.tensors():
            cut = wanted.get(canonical(name))
            check_equal(entry, whole[name] if cut is None else cut_out(whole[name], cut, True, name))
        assert sum(read) < 0.55 * total
        read.clear()


def test_two_ranks_of_a_gguf_file_answer_as_one_does(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=2)
    path = write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    words = [[7, 9, 30, 200], list(range(5, 42))]
    wanted = engines.run(engines.engine(path, quantization="none"), words)
    group = inprocess.Group(path, 2, quantization="none")
    for found in group.run(lambda engine: engines.run(engine, words)):
        assert [output.tokens for output in found] == [output.tokens for output in wanted]
