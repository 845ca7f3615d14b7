"""The header of a GGUF file: read as the gguf package reads it, and never trusted (O11)."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from anycore.errors import AnycoreError, WeightsError
from anycore.models.gguf.header import GgufFile
from anycore.models.gguf.weights import GgufCheckpoint
from anycore.models.source import locate

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(tiny.tiny_lm(folder / "hf", layers=2), folder / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)


def every_type(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_int32("t.i32", -(2**31))
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 1e300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.text", "щи 東京 \0 end")
    writer.add_array("t.numbers", [1.5, -2.5])
    writer.add_array("t.words", ["a", "", "ü"])


def test_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = write_gguf(tiny.tiny_lm(tmp_path / "hf", layers=1), tmp_path / "t.gguf", edit=every_type)
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.get(key) == field.contents(), key
    assert {t.name: (t.data_offset, t.n_bytes, int(t.tensor_type)) for t in reader.tensors} == {
        name: (info.offset, info.size, info.type) for name, info in file.tensors.items()
    }
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(int(n) for n in reversed(tensor.shape))
        assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()
    assert file.words("t.words", [2, 0]) == ["ü", "a"]
    assert file.get("t.absent", 3) == 3
    with pytest.raises(WeightsError, match=r"t\.absent"):
        file.need("t.absent")


def test_opening_does_not_decode_a_large_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    writer.add_token_list([f"word{i}" for i in range(150_000)])
    writer.add_token_scores([0.0] * 150_000)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoded = []
    string = GgufFile._string
    monkeypatch.setattr(GgufFile, "_string", lambda file, offset: decoded.append(offset) or string(file, offset))
    assert len(GgufFile(tmp_path / "large.gguf").tensors) == 1
    assert 0 < len(decoded) < 20  # keys and names of tensors


@pytest.mark.parametrize("keep", [1, 3, 20, 100, 5_000])
def test_o11_cut_inside_the_header(path: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"cut\.gguf") as caught:
        GgufFile(cut)
    assert keep < 24 or str(keep) in caught.value.message


@pytest.mark.parametrize("lost", [1, 1000, 100_000])
def test_o11_cut_inside_the_weights(path: Path, tmp_path: Path, lost: int) -> None:
    whole = path.read_bytes()
    end = max(t.offset + t.size for t in GgufFile(path).tensors.values())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: end - lost])
    with pytest.raises(WeightsError, match=rf"cut\.gguf.*{end} bytes.*{end - lost}"):
        locate(str(cut)).config()
    with pytest.raises(WeightsError, match=rf"cut\.gguf.*{end} bytes.*{end - lost}"):
        GgufCheckpoint(cut)


def test_o11_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(WeightsError, match=r"m\.gguf is empty \(0 bytes\)"):
        locate(str(tmp_path / "m.gguf"))


def test_o11_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text(POINTER)
    with pytest.raises(WeightsError, match=r"m\.gguf is a Git LFS pointer of 73 bytes.*98362432 bytes.*git lfs pull"):
        locate(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**63), "cut inside its header"),
        (16, struct.pack("<Q", 2**63), "damaged|cut inside"),
        (24, struct.pack("<Q", 2**63), "cut inside its header"),
    ],
)
def test_o11_damaged_header(path: Path, tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        GgufFile(tmp_path / "m.gguf")


def test_o11_tensor_listed_twice(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"blk.1.attn_norm.weight") == 1
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    with pytest.raises(WeightsError, match=r"m\.gguf lists 1 tensors twice"):
        GgufFile(tmp_path / "m.gguf")


def test_one_piece_of_several_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tiny.tiny_lm(tmp_path / "hf", layers=1), tmp_path / "m.gguf", edit=lambda w: w.add_uint16("split.count", 3)
    )
    with pytest.raises(WeightsError, match="one of 3 pieces"):
        GgufFile(path)


@settings(max_examples=300, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=8))
def test_no_damage_ends_otherwise_than_in_an_error_of_ours(path: Path, place: float, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    start = min(t.offset for t in GgufFile(path).tensors.values())
    offset = int(place * start)
    data[offset : offset + len(value)] = value
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(data)
    try:
        GgufFile(damaged)
    except AnycoreError as error:
        assert "damaged.gguf" in error.message  # noqa: PT017  (most damage is harmless: both ends are right)
