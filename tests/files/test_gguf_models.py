"""A GGUF file is the model it was made from: same spec, same weights; quantised, as transformers reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file
from tiny_gguf import write_gguf

from anycore.errors import Unsupported, WeightsError
from anycore.models.gguf.weights import GgufCheckpoint
from anycore.models.source import locate
from anycore.models.spec import read_spec

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True},
    "llama-untied": {"kv_heads": 4},
    "llama3": {"rope_parameters": LLAMA3, "max_positions": 131072},
    "llama3-other": {"rope_parameters": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 2048}},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "llama-bias": {"attention_bias": True},
    "mistral": {"window": 64},
    "qwen2": {},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": {"tied": True},
    "gemma3": {"tied": True, "window": 32, "layers": 7, "head_dim": 256, "heads": 2, "kv_heads": 1},
}


def make(name: str, folder: Path, **more: Any) -> Path:
    options = CASES[name] | {
        "family": name.split("-")[0].removesuffix("3") if name.startswith("llama") else name.split("-")[0]
    }
    return tiny.tiny_lm(folder / "hf", **{"layers": 2, **options, **more})


def dense(entry: Any) -> torch.Tensor:
    return entry if isinstance(entry, torch.Tensor) else entry.dense()


def comparable(spec: Any) -> Any:
    """Leave out what a GGUF header holds as float32, after checking that it is close, and what is spelled otherwise."""
    return replace(spec, norm_eps=round(spec.norm_eps, 9), eos_ids=spec.eos_ids[:1], tasks=spec.tasks)


@pytest.mark.parametrize("name", CASES)
def test_unquantised_file_equals_its_folder(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    assert comparable(read_spec(locate(str(path)))) == comparable(read_spec(locate(str(folder))))
    expected = load_file(folder / "model.safetensors")
    checkpoint = GgufCheckpoint(path)
    assert set(checkpoint.shapes) == set(expected)
    for key, tensor in checkpoint.tensors():
        assert tensor.shape == checkpoint.shapes[key]
        if "gemma3" in name and key.endswith("norm.weight"):  # w + 1 loses the last bits of w in float32
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=5e-7)
        else:
            assert torch.equal(tensor, expected[key]), key


def test_bert_equals_its_folder(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "hf", pooling="cls")
    path = write_gguf(folder, tmp_path / "tiny.gguf", edit=lambda w: w.add_pooling_type(gguf.PoolingType.CLS))
    mine, theirs = read_spec(locate(str(path))), read_spec(locate(str(folder)))
    assert mine.pooling is not None
    assert theirs.pooling is not None
    assert (mine.pooling.kind, mine.pooling.normalize) == ("cls", True)
    pooling = replace(theirs.pooling, max_length=mine.pooling.max_length)
    assert comparable(mine) == replace(comparable(theirs), pooling=pooling)
    expected = load_file(folder / "model.safetensors")
    for key, tensor in GgufCheckpoint(path).tensors():
        assert torch.equal(tensor, expected.pop(key))
    assert all(key.startswith("pooler") for key in expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_quantised_file_equals_transformers(name: str, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    usual = {"qwen2": {"head_dim": 32}, "qwen3": {"head_dim": 128}}  # transformers does not read Qwen's from the header
    folder = make(name, tmp_path, **usual.get(name, {}))
    path = write_gguf(folder, tmp_path / "tiny.gguf", Quantization[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    config, expected = theirs.config.to_dict(), theirs.state_dict()
    mine = locate(str(path)).config()
    skipped = {"dtype", "eos_token_id", "architectures", "_name_or_path"}
    if config.get("head_dim") is None:
        skipped.add("head_dim")
    assert {k: v for k, v in mine.items() if k not in skipped} == {k: config.get(k) for k in mine if k not in skipped}
    assert mine["architectures"] == [type(theirs).__name__]
    if mine["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    checkpoint = GgufCheckpoint(path)
    assert bool(checkpoint.formats) == (kind not in ("F16", "BF16", "Q5_1"))
    for key, tensor in checkpoint.tensors():
        assert isinstance(tensor, torch.Tensor) == (key not in checkpoint.formats)
        # d * q + m becomes (q - zero) * d, where the division leaves float32's last bits
        torch.testing.assert_close(dense(tensor), expected.pop(key), rtol=0, atol=1e-7 if kind == "Q4_1" else 0)
    assert not expected


def test_large_tensors_are_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(make("llama", tmp_path), tmp_path / "tiny.gguf", Quantization.Q4_1)
    plain = write_gguf(tmp_path / "hf", tmp_path / "plain.gguf", Quantization.Q5_1)
    whole = [(name, dense(tensor)) for file in (path, plain) for name, tensor in GgufCheckpoint(file).tensors()]
    monkeypatch.setattr("anycore.models.gguf.weights.CHUNK", 1000)
    monkeypatch.setattr("anycore.models.gguf.blocks.CHUNK", 1000)
    pieces = [(name, dense(tensor)) for file in (path, plain) for name, tensor in GgufCheckpoint(file).tensors()]
    for (name, one), (_, other) in zip(whole, pieces, strict=True):
        assert torch.equal(one, other), name
    halves = dict(GgufCheckpoint(plain, torch.bfloat16).tensors())
    assert all(torch.equal(halves[name], tensor.bfloat16()) for name, tensor in GgufCheckpoint(plain).tensors())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_expert_count(8), "expert_count = 8"),
        (lambda w: w.add_uint32("llama.rope.scaling.finetuned", 1), None),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "'longrope'"),
        (lambda w: w.add_causal_attention(False), "attention.causal = False"),
        (lambda w: w.add_sliding_window(64), None),
    ],
)
def test_what_the_header_says_is_refused_or_known(
    edit: Callable[[gguf.GGUFWriter], None], message: str | None, tmp_path: Path
) -> None:
    path = write_gguf(make("llama", tmp_path), tmp_path / "tiny.gguf", edit=edit)
    if message is None:
        locate(str(path)).config()
        return
    with pytest.raises(Unsupported, match=message):
        locate(str(path)).config()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.embedding_length", "x", "embedding_length = x, which must be a whole number"),
        ("llama.attention.head_count", 0, "head_count = 0, which must be a whole number"),
        ("llama.attention.head_count_kv", ["a", "a"], "head_count_kv = a, which must be a whole number"),
        ("llama.block_count", 1.5, "block_count = 1.5, which must be a whole number"),
        ("tokenizer.ggml.token_type", 3, "token_type = 3, which must be a list"),
        ("tokenizer.ggml.eos_token_id", [1, 2], r"eos_token_id = \[1, 2\], which must be a token id"),
        ("tokenizer.ggml.tokens", "x", "tokens must be a list of more than"),
        ("tokenizer.ggml.tokens", ["a"], "tokens must be a list of more than"),
        ("tokenizer.ggml.tokens", None, "tokens must be a list of more than"),
    ],
)
def test_o11_numbers_of_another_kind_are_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][key]
        kinds = {str: "STRING", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])

    path = write_gguf(make("llama", tmp_path), tmp_path / "tiny.gguf", edit=change)
    with pytest.raises(WeightsError, match=message):
        locate(str(path)).config()


def test_a_gemma_may_say_of_each_layer_whether_it_is_windowed(tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    path = write_gguf(make("gemma3", tmp_path), tmp_path / "tiny.gguf", edit=lambda w: w.add_array(key, [False, True]))
    assert locate(str(path)).config()["layer_types"] == ["full_attention", "sliding_attention"]


def test_a_bert_that_is_causal_is_refused(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["bert.attention.causal"]
        writer.add_causal_attention(True)

    path = write_gguf(tiny.tiny_bert(tmp_path / "hf"), tmp_path / "tiny.gguf", edit=change)
    with pytest.raises(Unsupported, match=r"attention\.causal = True"):
        locate(str(path)).config()


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = locate(str(tmp_path / "m.gguf"))
    with pytest.raises(Unsupported, match="'mamba'; known are llama, qwen2"):
        source.config()
    with pytest.raises(Unsupported, match="'mamba'"):
        GgufCheckpoint(tmp_path / "m.gguf")


def test_foreign_tensor_is_refused_by_name(tmp_path: Path) -> None:
    import numpy as np

    extra = np.zeros((4, 32), np.float32)
    path = write_gguf(
        make("llama", tmp_path), tmp_path / "tiny.gguf", edit=lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", extra)
    )
    with pytest.raises(WeightsError, match="ffn_gate_inp"):
        GgufCheckpoint(path)


def test_end_of_turn_words_end_an_answer(tmp_path: Path) -> None:
    folder = make("llama", tmp_path)
    source = locate(str(write_gguf(folder, tmp_path / "tiny.gguf")))
    words = tiny.SPECIAL
    eos = source.read_json("generation_config.json")["eos_token_id"]
    assert eos == [words.index(tiny.EOS), words.index(tiny.END_OF_TURN)]
    assert read_spec(source).eos_ids == tuple(eos)


def test_pooling_type_stands_for_sentence_transformers_files(tmp_path: Path) -> None:
    path = write_gguf(
        make("qwen3", tmp_path), tmp_path / "e.gguf", edit=lambda w: w.add_pooling_type(gguf.PoolingType.LAST)
    )
    spec = read_spec(locate(str(path)))
    assert spec.pooling is not None
    assert (spec.pooling.kind, spec.pooling.normalize, spec.pooling.source) == ("last", True, "files")
