"""Quantised checkpoints of other tools: each scheme's files are written by its definition, and read for what they mean.

Writers here go a number at a time, in float64 and whole numbers; what the readers do to whole tensors is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from reference import edit, load, packed, plain_backend, prompts
from safetensors.torch import load_file, save_file

from anycore.cli.main import main
from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight
from anycore.errors import AnycoreError, Unsupported, WeightsError
from anycore.models import loader
from anycore.models.checkpoint import Ordered, open_checkpoint
from anycore.models.quantised.folder import QuantisedFolder
from anycore.models.quantised.words import pack, unpack
from anycore.models.quantization import quantization
from anycore.models.source import Source
from anycore.models.spec import read_spec

LAYER = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 16, 64
Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]


def words(numbers: list[int], bits: int) -> list[int]:
    """Numbers one after the other in a stream of bits, the lowest first, cut into words as int32."""
    stream = sum(number << (bits * i) for i, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    values = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [value - 2**32 if value >= 2**31 else value for value in values]


def packed_rows(matrix: Array, bits: int) -> torch.Tensor:
    return torch.tensor([words([int(x) for x in row], bits) for row in matrix], dtype=torch.int32)


def random_numbers(bits: int, group: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Numbers [rows, columns], zero points and scales [rows, groups], which float16 holds exactly."""
    rng = np.random.default_rng(seed)
    groups = -(-COLUMNS // group)
    scale = rng.uniform(0.01, 0.02, (ROWS, groups)).astype(np.float16).astype(np.float64)
    zero = rng.integers(1, 2**bits, (ROWS, groups))
    return rng.integers(0, 2**bits, (ROWS, COLUMNS)), zero, scale


def meant(numbers: Array, zero: Array, scale: Array, groups: Array) -> Array:
    """(q - zero) * scale in float64, where input j is of group groups[j]."""
    return (numbers - zero[:, groups]) * scale[:, groups]


def folder_of(path: Path, settings: dict[str, Any] | None, tensors: Tensors) -> Source:
    config = {"architectures": ["LlamaForCausalLM"]} | ({"quantization_config": settings} if settings else {})
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return Source(str(path), path)


def read(source: Source, layer: str = LAYER) -> Any:
    """The matrix of a layer, after checking that the headers said the same of it as what was read."""
    checkpoint = open_checkpoint(source)
    found = dict(checkpoint.tensors())
    assert list(found) == list(checkpoint.shapes)
    entry = found[f"{layer}.weight"]
    weight = entry.weight if isinstance(entry, Ordered) else entry
    assert tuple(weight.shape) == tuple(checkpoint.shapes[f"{layer}.weight"])
    kinds = {Int4Weight: "int4", Int8Weight: "int8", Fp8Weight: "fp8"}
    if isinstance(weight, torch.Tensor):
        assert f"{layer}.weight" not in checkpoint.formats
    else:
        wanted = checkpoint.formats[f"{layer}.weight"]
        assert wanted.kind == kinds[type(weight)]
        if not isinstance(weight, Fp8Weight):
            assert (wanted.group or weight.shape[1]) == weight.group
    return entry


def dense(entry: Any) -> Array:
    """What an entry stands for, by the contract's definition, with its columns where the checkpoint has them."""
    if isinstance(entry, Ordered):
        result = np.empty(entry.weight.shape)
        result[:, entry.order.numpy()] = entry.weight.dense().double().numpy()
        return result
    return (entry if isinstance(entry, torch.Tensor) else entry.dense()).double().numpy()


# AWQ: eight outputs of an input in a word, in the order 0 2 4 6 1 3 5 7.

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def awq_words(matrix: Array) -> torch.Tensor:
    """[outputs, n] → [n, outputs / 8]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = [
        [words([int(column[start + place]) for place in order], 4)[0] for start in range(0, len(column), 8)]
        for column in matrix.T
    ]
    return torch.tensor(rows, dtype=torch.int32)


def awq_tensors() -> tuple[Tensors, Array]:
    numbers, zero, scale = random_numbers(4, 32)
    tensors = {
        f"{LAYER}.qweight": awq_words(numbers),
        f"{LAYER}.qzeros": awq_words(zero),
        f"{LAYER}.scales": torch.tensor(scale.T, dtype=torch.float16),
        "model.norm.weight": torch.ones(8),
    }
    return tensors, meant(numbers, zero, scale, np.arange(COLUMNS) // 32)


def test_awq(tmp_path: Path) -> None:
    tensors, expected = awq_tensors()
    source = folder_of(tmp_path, AWQ, tensors)
    entry = read(source)
    assert isinstance(entry, Int4Weight)
    np.testing.assert_allclose(dense(entry), expected, rtol=1e-6)
    assert open_checkpoint(source).formats == {f"{LAYER}.weight": Format("int4", 32)}


def test_awq_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    tensors, expected = awq_tensors()
    source = folder_of(tmp_path, None, tensors)
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32, "version": "GEMM"}))
    np.testing.assert_allclose(dense(read(source)), expected, rtol=1e-6)


# GPTQ: consecutive inputs of an output in a word; version 1 stores a zero point less one.


def gptq_tensors(bits: int, group: int, version: int, index: Array | None = None) -> tuple[Tensors, Array]:
    numbers, zero, scale = random_numbers(bits, group, seed=bits)
    groups = np.arange(COLUMNS) // group if index is None else index
    tensors = {
        f"{LAYER}.qweight": packed_rows(numbers, bits).T,
        f"{LAYER}.qzeros": packed_rows(zero.T - (version == 1), bits),
        f"{LAYER}.scales": torch.tensor(scale.T, dtype=torch.float16),
        f"{LAYER}.g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    return tensors, meant(numbers, zero, scale, groups)


def gptq(bits: int, group: int, version: int, **more: Any) -> dict[str, Any]:
    layout = "gptq_v2" if version == 2 else "gptq"
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "checkpoint_format": layout, **more,
    }  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, version: int, tmp_path: Path) -> None:
    tensors, expected = gptq_tensors(bits, 32, version)
    entry = read(folder_of(tmp_path, gptq(bits, 32, version), tensors))
    assert isinstance(entry, torch.Tensor if bits == 8 else Int4Weight)
    np.testing.assert_allclose(dense(entry), expected, rtol=1e-6)


def test_gptq_of_eight_symmetric_bits_stays_small(tmp_path: Path) -> None:
    numbers, _, scale = random_numbers(8, 64)
    zero = np.full_like(scale, 128, dtype=np.int64)
    tensors = {
        f"{LAYER}.qweight": packed_rows(numbers, 8).T,
        f"{LAYER}.qzeros": packed_rows(zero.T - 1, 8),
        f"{LAYER}.scales": torch.tensor(scale.T, dtype=torch.float16),
    }
    entry = read(folder_of(tmp_path, gptq(8, -1, 1, sym=True), tensors))
    assert isinstance(entry, Int8Weight)
    np.testing.assert_allclose(dense(entry), meant(numbers, zero, scale, np.zeros(COLUMNS, int)), rtol=1e-6)
    tensors[f"{LAYER}.qzeros"] = packed_rows(zero.T, 8)
    refused(folder_of(tmp_path, gptq(8, -1, 1, sym=True), tensors), f"{LAYER}.qzeros", "128")


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_in_the_order_of_activations(bits: int, tmp_path: Path) -> None:
    index = np.random.default_rng(1).permutation(np.arange(COLUMNS) // 32)
    tensors, expected = gptq_tensors(bits, 32, 2, index)
    entry = read(folder_of(tmp_path, gptq(bits, 32, 2, desc_act=True), tensors))
    assert isinstance(entry, torch.Tensor if bits == 8 else Ordered)
    np.testing.assert_allclose(dense(entry), expected, rtol=1e-6)


def test_gptq_index_that_no_order_makes_groups_of(tmp_path: Path) -> None:
    index = np.arange(COLUMNS) // 32
    index[0] = 1
    tensors, _ = gptq_tensors(4, 32, 1, index)
    refused(folder_of(tmp_path, gptq(4, 32, 1), tensors), f"{LAYER}.g_idx")


# compressed-tensors


def compressed(bits: int, kind: str = "int", group: int | None = None, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **strategy, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_compressed_packed(bits: int, symmetric: bool, tmp_path: Path) -> None:
    numbers, zero, scale = random_numbers(bits, 32)
    if symmetric:
        zero = np.full_like(zero, 2 ** (bits - 1))
    tensors = {
        f"{LAYER}.weight_packed": packed_rows(numbers, bits),
        f"{LAYER}.weight_scale": torch.tensor(scale, dtype=torch.float16),
        f"{LAYER}.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if not symmetric:
        tensors[f"{LAYER}.weight_zero_point"] = packed_rows(zero.T, bits).T
    entry = read(folder_of(tmp_path, compressed(bits, group=32, symmetric=symmetric), tensors))
    wanted = Int4Weight if bits <= 4 else Int8Weight if symmetric else torch.Tensor
    assert isinstance(entry, wanted)
    np.testing.assert_allclose(dense(entry), meant(numbers, zero, scale, np.arange(COLUMNS) // 32), rtol=1e-6)


def test_compressed_in_the_order_of_activations(tmp_path: Path) -> None:
    index = np.random.default_rng(2).permutation(np.arange(COLUMNS) // 32)
    numbers, _, scale = random_numbers(4, 32)
    tensors = {
        f"{LAYER}.weight_packed": packed_rows(numbers, 4),
        f"{LAYER}.weight_scale": torch.tensor(scale, dtype=torch.float16),
        f"{LAYER}.weight_g_idx": torch.tensor(index, dtype=torch.int32),
    }
    entry = read(folder_of(tmp_path, compressed(4, group=32, actorder="group"), tensors))
    assert isinstance(entry, Ordered)
    np.testing.assert_allclose(dense(entry), meant(numbers, np.full_like(scale, 8), scale, index), rtol=1e-6)


@pytest.mark.parametrize("shape", [(ROWS, 1), (1,)])
def test_compressed_bytes(shape: tuple[int, ...], tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    numbers = rng.integers(-128, 128, (ROWS, COLUMNS))
    scale = rng.uniform(0.01, 0.02, shape).astype(np.float32)
    tensors = {
        f"{LAYER}.weight": torch.tensor(numbers, dtype=torch.int8),
        f"{LAYER}.weight_scale": torch.tensor(scale),
        f"{LAYER}.input_scale": torch.tensor([0.1]),
        f"{LAYER}.bias": torch.zeros(ROWS),
    }
    entry = read(folder_of(tmp_path, compressed(8) | {"format": "int-quantized"}, tensors))
    assert isinstance(entry, Int8Weight)
    np.testing.assert_allclose(dense(entry), numbers * scale.reshape(-1, 1).astype(np.float64), rtol=1e-6)


def test_compressed_bytes_with_zero_points(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    numbers, zero = rng.integers(-128, 128, (ROWS, COLUMNS)), rng.integers(-128, 128, (ROWS, 1))
    scale = rng.uniform(0.01, 0.02, (ROWS, 1)).astype(np.float32)
    tensors = {
        f"{LAYER}.weight": torch.tensor(numbers, dtype=torch.int8),
        f"{LAYER}.weight_scale": torch.tensor(scale),
        f"{LAYER}.weight_zero_point": torch.tensor(zero, dtype=torch.int8),
    }
    entry = read(folder_of(tmp_path, compressed(8, symmetric=False) | {"format": "int-quantized"}, tensors))
    np.testing.assert_allclose(dense(entry), (numbers - zero) * scale.astype(np.float64), rtol=1e-6)


def test_compressed_groups_name_layers(tmp_path: Path) -> None:
    """The first target is a class, the second a pattern: the pattern decides for the layer that it names."""
    numbers, _, scale = random_numbers(8, 64)
    first, second = compressed(4, group=32)["config_groups"]["group_0"], compressed(8)["config_groups"]["group_0"]
    settings = compressed(4) | {"config_groups": {"a": first, "b": second | {"targets": [r"re:.*up_proj$"]}}}
    tensors = {
        f"{LAYER}.weight_packed": packed_rows(numbers, 8),
        f"{LAYER}.weight_scale": torch.tensor(scale, dtype=torch.float32),
    }
    entry = read(folder_of(tmp_path, settings, tensors))
    assert isinstance(entry, Int8Weight)
    np.testing.assert_allclose(dense(entry), (numbers - 128) * scale, rtol=1e-6)


# e4m3


def e4m3(seed: int = 0) -> tuple[torch.Tensor, Array]:
    """Weights, and what they are by the definition of the format: sign, four bits of exponent, three of fraction."""
    bits = torch.randint(0, 256, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x30
    raw = bits.numpy().astype(int)
    exponent, fraction = (raw >> 3) & 15, raw & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return bits.view(torch.float8_e4m3fn), np.where(raw & 128, -size, size)


@pytest.mark.parametrize("shape", [(), (1,), (ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt", "compressed-tensors"])
def test_fp8(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, value = e4m3()
    scale = np.random.default_rng(4).uniform(0.01, 0.02, shape).astype(np.float32)
    tensors = {
        f"{LAYER}.weight": weight,
        f"{LAYER}.weight_scale": torch.tensor(scale),
        "model.norm.weight": torch.ones(4),
    }
    settings = (
        compressed(8, "float") if method == "compressed-tensors" else {"quant_method": method, "quant_algo": "FP8"}
    )
    entry = read(folder_of(tmp_path, settings, tensors))
    assert isinstance(entry, Fp8Weight)
    np.testing.assert_allclose(dense(entry), value * scale.reshape(-1, 1).astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_in_blocks_is_made_dense(method: str, tmp_path: Path) -> None:
    weight, value = e4m3()
    scale = np.random.default_rng(4).uniform(0.01, 0.02, (3, 2)).astype(np.float32)  # of 6 x 48, the last ones cut
    expected = value * scale[np.arange(ROWS) // 6][:, np.arange(COLUMNS) // 48]
    ending = "weight_scale_inv" if method == "fp8" else "weight_scale"
    settings = {"quant_method": "fp8", "weight_block_size": [6, 48], "activation_scheme": "dynamic"}
    if method == "compressed-tensors":
        settings = compressed(8, "float", strategy="block", block_structure=[6, 48])
    entry = read(folder_of(tmp_path, settings, {f"{LAYER}.weight": weight, f"{LAYER}.{ending}": torch.tensor(scale)}))
    assert isinstance(entry, torch.Tensor)
    np.testing.assert_allclose(dense(entry), expected, rtol=1e-6)


# What cannot be right is refused, with the file and the tensor.


def refused(source: Source, *said: str, error: type[AnycoreError] = WeightsError) -> None:
    with pytest.raises(error) as caught:
        dict(open_checkpoint(source).tensors())
    for word in said:
        assert word in caught.value.message
    assert caught.value.exit_code != 0


Damage = Callable[[Tensors], Any]


def drop(ending: str) -> Damage:
    return lambda tensors: tensors.pop(f"{LAYER}.{ending}")


def change(ending: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda tensors: tensors.update({f"{LAYER}.{ending}": edit(tensors[f"{LAYER}.{ending}"])})


def first_is(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        tensor.view(-1)[0] = number
        return tensor

    return edit


DAMAGE: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no scales": (drop("scales"), ("scales is missing",)),
    "no zeros": (drop("qzeros"), ("qzeros is missing",)),
    "scales of another shape": (change("scales", lambda x: x[:1]), (f"{LAYER}.scales", "[1, 16]", "[2, 16]")),
    "scales of no size": (change("scales", lambda x: x[:0]), (f"{LAYER}.scales", "[0, 16]")),
    "scales of whole numbers": (change("scales", lambda x: x.int()), (f"{LAYER}.scales", "I32")),
    "a scale that is NaN": (change("scales", first_is(float("nan"))), (f"{LAYER}.scales", "NaN")),
    "a scale that is infinite": (change("scales", first_is(float("inf"))), (f"{LAYER}.scales", "infinite")),
    "a negative scale": (change("scales", first_is(-0.5)), (f"{LAYER}.scales", "-0.5")),
    "zeros of another shape": (change("qzeros", lambda x: x[:, :1]), (f"{LAYER}.qzeros", "[2, 1]")),
    "weights of one dimension": (change("qweight", lambda x: x.flatten()), (f"{LAYER}.qweight",)),
    "weights of floats": (change("qweight", lambda x: x.float()), (f"{LAYER}.qweight", "F32")),
    "half of the weights": (change("qweight", lambda x: x[:-8]), (f"{LAYER}.q",)),
    "dense beside quantised": (
        lambda t: t.update({f"{LAYER}.weight": torch.ones(2, 2)}),
        (f"{LAYER}.weight", "beside"),
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_damaged(method: str, name: str, tmp_path: Path) -> None:
    tensors = awq_tensors()[0] if method == "awq" else gptq_tensors(4, 32, 1)[0]
    damage, said = DAMAGE[name]
    damage(tensors)
    refused(folder_of(tmp_path, AWQ if method == "awq" else gptq(4, 32, 1), tensors), "model.safetensors", *said)


FP8_DAMAGE: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no scale": (drop("weight_scale"), ("weight_scale_inv is missing",)),
    "as many scales as columns": (
        change("weight_scale", lambda x: torch.ones(COLUMNS)),
        (f"[{COLUMNS}]", "weight_scale"),
    ),
    "a NaN among scales": (change("weight_scale", first_is(float("nan"))), ("weight_scale", "NaN")),
    "a negative scale": (change("weight_scale", first_is(-1)), ("weight_scale", "-1")),
    "a NaN among weights": (
        change("weight", lambda x: first_is(127)(x.view(torch.uint8)).view(torch.float8_e4m3fn)),
        (f"{LAYER}.weight holds 1 weights",),
    ),
    "weights with other exponents": (change("weight", lambda x: x.float().to(torch.float8_e5m2)), ("F8_E5M2",)),
    "dense with scales": (change("weight", lambda x: x.float()), ("F32", "scales")),
}


@pytest.mark.parametrize("name", FP8_DAMAGE)
def test_damaged_fp8(name: str, tmp_path: Path) -> None:
    tensors = {f"{LAYER}.weight": e4m3()[0], f"{LAYER}.weight_scale": torch.full((ROWS,), 0.01)}
    damage, said = FP8_DAMAGE[name]
    damage(tensors)
    refused(folder_of(tmp_path, {"quant_method": "fp8"}, tensors), "model.safetensors", *said)


COMPRESSED_DAMAGE: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no zero points": (drop("weight_zero_point"), ("weight_zero_point is missing",)),
    "another shape written": (
        change("weight_shape", lambda x: x + 1),
        ("weight_shape", f"[{ROWS + 1}, {COLUMNS + 1}]"),
    ),
    "scales of other groups": (change("weight_scale", lambda x: x[:, :1]), ("weight_scale", "[16, 1]", "[16, 2]")),
    "zero points of other groups": (change("weight_zero_point", lambda x: x[:, :1]), ("weight_zero_point", "[2, 1]")),
    "a scale that is NaN": (change("weight_scale", first_is(float("nan"))), ("weight_scale", "NaN")),
}


@pytest.mark.parametrize("name", COMPRESSED_DAMAGE)
def test_damaged_compressed(name: str, tmp_path: Path) -> None:
    numbers, zero, scale = random_numbers(4, 32)
    tensors = {
        f"{LAYER}.weight_packed": packed_rows(numbers, 4),
        f"{LAYER}.weight_scale": torch.tensor(scale),
        f"{LAYER}.weight_shape": torch.tensor([ROWS, COLUMNS]),
        f"{LAYER}.weight_zero_point": packed_rows(zero.T, 4).T,
    }
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"].half()
    damage, said = COMPRESSED_DAMAGE[name]
    damage(tensors)
    settings = compressed(4, group=32, symmetric=False)
    refused(folder_of(tmp_path, settings, tensors), "model.safetensors", LAYER, *said)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    "no method": ({"bits": 4}, "None"),
    "AWQ for one kernel": (AWQ | {"version": "gemv"}, "gemv"),
    "AWQ of three bits": (AWQ | {"bits": 3}, "3 bits"),
    "GPTQ of five bits": (gptq(5, 32, 1), "5 bits"),
    "GPTQ of another layout": (gptq(4, 32, 1) | {"checkpoint_format": "marlin"}, "marlin"),
    "GPTQ with layers of their own": (gptq(4, 32, 1, dynamic={"x": {}}), "dynamic"),
    "sparse": (compressed(4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    "4-bit floats": (compressed(4, "float"), "'float'"),
    "another format": (compressed(4) | {"format": "nvfp4-pack-quantized"}, "nvfp4"),
    "ModelOpt of 4 bits": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "blocks of words": ({"quant_method": "fp8", "weight_block_size": "large"}, "large"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_scheme(name: str, tmp_path: Path) -> None:
    settings, said = UNKNOWN[name]
    refused(folder_of(tmp_path, settings, awq_tensors()[0]), "config.json", said, error=Unsupported)


def test_parts_in_several_files(tmp_path: Path) -> None:
    """Shards may fall between the parts of a matrix: it comes when the last of them has."""
    tensors, expected = awq_tensors()
    source = folder_of(tmp_path, AWQ, {})
    (tmp_path / "model.safetensors").unlink()
    index = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        file = f"model-{number}.safetensors"
        save_file({name: tensor.contiguous()}, tmp_path / file)
        index[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = open_checkpoint(source)
    assert isinstance(checkpoint, QuantisedFolder)
    assert checkpoint.file_of(f"{LAYER}.weight").endswith(".safetensors")
    np.testing.assert_allclose(dense(read(source)), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_written_are_read(bits: int) -> None:
    numbers = torch.randint(0, 2**bits, (3, 21), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    written = pack(numbers, bits)
    assert torch.equal(written, packed_rows(numbers.numpy(), bits))
    assert torch.equal(unpack(written, bits)[:, :21], numbers)


# Whole models: what config.json announces is what the files hold, and layers compute with what weights stand for.


def quantised_model(path: Path, settings: dict[str, Any], write: Callable[[str, Array, int], Tensors]) -> Path:
    """A tiny Llama, its seven matrices a layer written by `write` (layer, numbers, seed); others stay as they are."""
    folder = tiny.tiny_lm(path / "quantised", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, tied=True)
    tensors: Tensors = {}
    for seed, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        tensors |= write(layer, tensor.double().numpy(), seed) if name.endswith("_proj.weight") else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    edit(folder, quantization_config=settings)
    return folder


def rounded(matrix: Array, groups: Array) -> tuple[Array, Array, Array]:
    """Numbers, zero points and scales of four bits, of inputs that belong to `groups`."""
    count = groups.max() + 1
    scale, zero = np.empty((len(matrix), count)), np.empty((len(matrix), count), int)
    for group in range(count):
        part = matrix[:, groups == group]
        low, high = np.minimum(part.min(1), -1e-3), np.maximum(part.max(1), 1e-3)
        scale[:, group] = np.float16((high - low) / 14)
        zero[:, group] = np.clip(np.round(-low / scale[:, group]), 1, 15)
    return np.clip(np.round(matrix / scale[:, groups] + zero[:, groups]), 0, 15).astype(int), zero, scale


def awq_layer(layer: str, matrix: Array, seed: int) -> Tensors:
    numbers, zero, scale = rounded(matrix, np.arange(matrix.shape[1]) // 32)
    return {
        f"{layer}.qweight": awq_words(numbers),
        f"{layer}.qzeros": awq_words(zero),
        f"{layer}.scales": torch.tensor(scale.T, dtype=torch.float16),
    }


def gptq_layer(layer: str, matrix: Array, seed: int) -> Tensors:
    """In the order of activations, which is the same for all that are multiplied by the same inputs."""
    index = np.random.default_rng(matrix.shape[1]).permutation(np.arange(matrix.shape[1]) // 32)
    numbers, zero, scale = rounded(matrix, index)
    return {
        f"{layer}.qweight": packed_rows(numbers, 4).T,
        f"{layer}.qzeros": packed_rows(zero.T - 1, 4),
        f"{layer}.scales": torch.tensor(scale.T, dtype=torch.float16),
        f"{layer}.g_idx": torch.tensor(index, dtype=torch.int32),
    }


def compressed_layer(layer: str, matrix: Array, seed: int) -> Tensors:
    scale = np.abs(matrix).max(1, keepdims=True) / 127
    return {
        f"{layer}.weight": torch.tensor(np.round(matrix / scale), dtype=torch.int8),
        f"{layer}.weight_scale": torch.tensor(scale, dtype=torch.float32),
    }


def fp8_layer(layer: str, matrix: Array, seed: int) -> Tensors:
    scale = float(np.abs(matrix).max()) / 448
    weight = torch.tensor(matrix / scale, dtype=torch.float32).to(torch.float8_e4m3fn)
    return {f"{layer}.weight": weight, f"{layer}.weight_scale": torch.tensor(scale, dtype=torch.float32)}


MODELS: dict[str, tuple[dict[str, Any], Callable[[str, Array, int], Tensors], str]] = {
    "awq": (AWQ | {"modules_to_not_convert": None}, awq_layer, "w4a16"),
    "gptq": (gptq(4, 32, 1, desc_act=True), gptq_layer, "w4a16"),
    "compressed": (compressed(8) | {"format": "int-quantized", "ignore": ["lm_head"]}, compressed_layer, "w8a8"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_layer, "fp8"),
}


@pytest.mark.parametrize("method", MODELS)
def test_a_model_computes_with_what_its_weights_stand_for(method: str, tmp_path: Path) -> None:
    settings, write, scheme = MODELS[method]
    folder = quantised_model(tmp_path, settings, write)
    source = Source(str(folder), folder)
    spec = read_spec(source)
    assert spec.stored is not None
    assert (spec.stored.scheme, len(spec.stored.formats)) == (scheme, 2 * 7)
    loader.check(source, spec)
    plain = tiny.tiny_lm(tmp_path / "dense", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, tied=True)
    meaning = {name: torch.tensor(dense(entry)).float() for name, entry in open_checkpoint(source).tensors()}
    save_file({name: tensor.contiguous() for name, tensor in meaning.items()}, plain / "model.safetensors")
    text = prompts(400, 30)[0]
    kept = quantization(spec, "auto", scheme, 32, tables=False)
    assert kept is not None
    assert len(kept.formats) == 2 * 7
    small = loader.load(source, spec, plain_backend(), "float32", quantization=kept)
    torch.testing.assert_close(packed(small, [text])[0], packed(load(plain), [text])[0], rtol=0, atol=2e-4)
    as_dense = loader.load(source, spec, plain_backend(), "float32")
    torch.testing.assert_close(packed(as_dense, [text])[0], packed(load(plain), [text])[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("method", MODELS)
def test_serve_stops_before_it_is_ready(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is none and a layer that is dense though config.json says otherwise: one line, and not 0."""
    settings, write, _ = MODELS[method]
    folder = quantised_model(tmp_path, settings, write)
    path = folder / "model.safetensors"
    layer, good = "model.layers.1.mlp.down_proj", load_file(path)
    scales = next(name for name in good if name.startswith(f"{layer}.") and "scale" in name)
    save_file(good | {scales: torch.full_like(good[scales], float("nan"))}, path)
    words = ["generate", str(folder), "Hello", "--backend", "cpu", "--max-model-len", "64", "--quantization", "none"]
    assert main(words) not in (0, 70)
    assert str(path) in (printed := capsys.readouterr().err)
    assert scales in printed
    mixed = {name: tensor for name, tensor in good.items() if not name.startswith(f"{layer}.")}
    save_file(mixed | {f"{layer}.weight": torch.ones(64, 2 * 64)}, path)
    assert main(words) not in (0, 70)
    assert f"{layer}.weight" in capsys.readouterr().err
