"""Blocks of ggml, taken apart: what they stand for is what the gguf package makes of the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from tiny_gguf import write_gguf

from anycore.contract.weights import Int4Weight
from anycore.errors import WeightsError
from anycore.models.gguf.blocks import BLOCKS, LARGEST_ZERO, repack
from anycore.models.gguf.names import FORMATS
from anycore.models.gguf.weights import GgufCheckpoint
from anycore.models.parameters import canonical
from anycore.models.source import locate
from anycore.models.spec import read_spec

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip
"""Bytes of a block at which float16 numbers begin: the scale, and the minimum where there is one."""

ROWS, BLOCKS_A_ROW = 7, 3


def random_blocks(kind: str, seed: int = 0) -> tuple[np.ndarray[Any, Any], int]:
    """[rows, bytes] of any bytes but for the scales, which are finite; and the columns they stand for."""
    size, stored = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (ROWS * BLOCKS_A_ROW, stored), dtype=np.uint8)
    for start in HALVES[kind]:
        set_half(blocks, start, rng.normal(size=len(blocks)))
    return blocks.reshape(ROWS, -1), size * BLOCKS_A_ROW


def set_half(blocks: np.ndarray[Any, Any], start: int, numbers: Any) -> None:
    blocks[:, start : start + 2] = (
        np.broadcast_to(np.float16(numbers), len(blocks)).copy().view(np.uint8).reshape(-1, 2)
    )


def exact(raw: np.ndarray[Any, Any], kind: str) -> torch.Tensor:
    return torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))


def test_every_format_that_is_promised_is_taken_apart() -> None:
    assert BLOCKS.keys() == FORMATS.keys() == HALVES.keys()


@pytest.mark.parametrize("kind", BLOCKS)
def test_any_bytes(kind: str) -> None:
    raw, columns = random_blocks(kind)
    weight = repack(raw, kind, columns)
    assert weight.shape == (ROWS, columns)
    assert weight.group == FORMATS[kind].group
    wanted = exact(raw, kind)
    if len(HALVES[kind]) == 1:
        assert torch.equal(weight.dense(), wanted)
    else:  # the zero point is a quotient
        torch.testing.assert_close(weight.dense(), wanted, rtol=0, atol=3e-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", [kind for kind, starts in HALVES.items() if len(starts) == 2])
@pytest.mark.parametrize("scale", [0.0, 6e-8, 1e-5])
def test_scales_that_say_next_to_nothing(kind: str, scale: float) -> None:
    """A minimum with a scale of nothing: a zero point would be infinite, or too large for 16 bits."""
    raw, columns = random_blocks(kind)
    set_half(raw.reshape(ROWS * BLOCKS_A_ROW, -1), HALVES[kind][0], scale)
    weight = repack(raw, kind, columns)
    assert isinstance(weight, Int4Weight)
    assert float(weight.zero.abs().max()) <= LARGEST_ZERO
    wanted = exact(raw, kind)
    torch.testing.assert_close(weight.dense(), wanted, rtol=2**-9, atol=16 * 63 * scale if scale < 1e-6 else 1e-2)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_scale_that_is_none(kind: str, number: float) -> None:
    for start in HALVES[kind]:
        raw, columns = random_blocks(kind)
        set_half(raw.reshape(ROWS * BLOCKS_A_ROW, -1)[4:5], start, number)
        with pytest.raises(ValueError, match="NaN or infinite"):
            repack(raw, kind, columns)


def test_a_file_with_such_a_scale_names_itself_and_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tiny.tiny_lm(tmp_path / "hf", layers=1), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    info = GgufCheckpoint(path).file.tensors["blk.0.ffn_up.weight"]
    with open(path, "r+b") as file:
        file.seek(info.offset)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(WeightsError) as caught:
        list(GgufCheckpoint(path).tensors())
    assert str(path) in caught.value.message
    assert "blk.0.ffn_up.weight" in caught.value.message


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1", "F32"])
def test_the_header_promises_what_the_file_gives(kind: str, tmp_path: Path) -> None:
    """The plan is made of the spec's formats, before weights are read."""
    path = write_gguf(tiny.tiny_lm(tmp_path / "hf", layers=1), tmp_path / "m.gguf", GGMLQuantizationType[kind])
    spec = read_spec(locate(str(path)))
    given = {canonical(name): format for name, format in GgufCheckpoint(path).formats.items()}
    if kind in ("Q5_1", "F32"):
        assert spec.stored is None
        assert not given
    else:
        assert spec.stored is not None
        assert spec.stored.scheme == "gguf"
        assert dict(spec.stored.formats) == given


def test_tables_of_numbers_are_made_dense(tmp_path: Path) -> None:
    """IQ4_NL looks four bits up in a table: no scale and zero point stand for that."""
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1)
    path = write_gguf(folder, tmp_path / "m.gguf", GGMLQuantizationType.Q4_0)
    name = "blk.0.ffn_up.weight"
    reader = gguf.GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.name == name)
    before = GgufCheckpoint(path)
    offset = before.file.tensors[name].offset
    raw = np.array(tensor.data).tobytes()
    content = path.read_bytes()
    at = content.index(name.encode()) + len(name) + 4 + 2 * 8  # the name, the number of dimensions, two of them
    kinds = int(GGMLQuantizationType.Q4_0).to_bytes(4, "little"), int(GGMLQuantizationType.IQ4_NL).to_bytes(4, "little")
    assert content[at : at + 4] == kinds[0]
    path.write_bytes(content[:at] + kinds[1] + content[at + 4 :])  # the same bytes: both have 18 for 32 numbers
    checkpoint = GgufCheckpoint(path)
    hf = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.file.tensors[name].offset == offset
    assert hf in before.formats
    assert hf not in checkpoint.formats
    found = dict(checkpoint.tensors())[hf]
    wanted = quants.dequantize(np.frombuffer(raw, np.uint8).reshape(tensor.data.shape), GGMLQuantizationType.IQ4_NL)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.from_numpy(wanted))
