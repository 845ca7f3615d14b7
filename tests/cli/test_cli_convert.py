"""`anycore convert`: what it writes is read as it was meant, by us and by others; nothing is left half-written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gguf import GGMLQuantizationType
from reference import gap, packed, plain_backend, prompts
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_gguf import write_gguf

from anycore.cli.main import main
from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight
from anycore.models import loader
from anycore.models.checkpoint import open_checkpoint
from anycore.models.convert.form import wanted
from anycore.models.quantised.rounding import quantise
from anycore.models.source import Source, locate
from anycore.models.spec import read_spec

UP = "model.layers.0.mlp.up_proj"
KINDS = {"w8a8": Int8Weight, "w4a16": Int4Weight, "fp8": Fp8Weight}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_lm(tmp_path_factory.mktemp("hf"), layers=2, hidden=128, tied=True)


def convert(model: Path, out: Path, *flags: str) -> Path:
    assert main(["convert", str(model), str(out), *flags]) == 0
    assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]
    return out


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *said: str) -> None:
    """The command fails, says each of `said`, and leaves nothing behind."""
    out = Path(words[1])
    before = set(out.parent.iterdir())
    assert main(["convert", *words]) != 0
    printed = capsys.readouterr().err
    for word in said:
        assert word in printed
    assert set(out.parent.iterdir()) == before


def logits(folder: Path) -> torch.Tensor:
    source = locate(str(folder))
    model = loader.load(source, read_spec(source), plain_backend(), "float32")
    with torch.inference_mode():
        return model.logits(packed(model, [prompts(400, 24)[0]])[0])


@pytest.mark.parametrize("scheme", KINDS)
def test_what_is_written_is_what_rounding_gives(scheme: str, folder: Path, tmp_path: Path) -> None:
    out = convert(folder, tmp_path / "out", "--quantization", scheme)
    checkpoint = open_checkpoint(Source("out", out))
    dense = load_file(folder / "model.safetensors")
    found = dict(checkpoint.tensors())
    assert found.keys() == dense.keys()
    for name, tensor in dense.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(found[name], tensor), name
            continue
        expected = quantise(tensor, wanted(scheme, 32, tensor.shape[1]))
        assert isinstance(found[name], KINDS[scheme])
        assert torch.equal(found[name].dense(), expected.dense()), name
        step = tensor.abs().amax() * {"w8a8": 1 / 100, "w4a16": 1 / 10, "fp8": 1 / 12}[scheme]
        assert gap(found[name].dense(), tensor) < step


@pytest.mark.parametrize("scheme", KINDS)
def test_compressed_tensors_reads_the_same(scheme: str, folder: Path, tmp_path: Path) -> None:
    """The package that defines the format, on the tensors of each layer."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    assert package.__version__
    out = convert(folder, tmp_path / "out", "--quantization", scheme)
    settings = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    group = settings.config_groups["group_0"]
    stored = load_file(out / "model.safetensors")
    ours = dict(open_checkpoint(Source("out", out)).tensors())
    compressor = BaseCompressor.get_value_from_registry(settings.format)
    layers = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert len(layers) == 2 * 7
    for layer in layers:
        parts = {name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(f"{layer}.")}
        theirs = compressor.decompress(parts, group)["weight"]
        torch.testing.assert_close(theirs.float(), ours[f"{layer}.weight"].dense(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scheme", KINDS)
def test_transformers_computes_the_same(scheme: str, folder: Path, tmp_path: Path) -> None:
    """With weights made dense: transformers 5.24 does not take the zero points of 4 bits as they are stored."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    out = convert(folder, tmp_path / "out", "--quantization", scheme)
    theirs = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompts(400, 24)[0]])).logits[0]
    assert gap(logits(out), expected) < 1e-4


def test_tables_make_the_rest_small(folder: Path, tmp_path: Path) -> None:
    out = convert(folder, tmp_path / "out", "--quantization", "w4a16", "--tables")
    source = locate(str(out))
    spec = read_spec(source)
    assert spec.stored is not None
    assert dict(spec.stored.formats)["embed_tokens.weight"].kind == "int4"
    assert isinstance(dict(open_checkpoint(source).tensors())["model.embed_tokens.weight"], Int4Weight)
    assert spec.stored.scheme == "w4a16"
    exact = logits(folder)
    assert float((logits(out) - exact).std()) < 0.6 * float(exact.std())  # random weights are hard to round


def test_layers_kept_dense(folder: Path, tmp_path: Path) -> None:
    out = convert(
        folder, tmp_path / "out", "--quantization", "w8a8", "--keep-dense", "layers.0.mlp.*,layers.1.self_attn.o_proj"
    )
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    found = dict(open_checkpoint(Source("out", out)).tensors())
    kept = {name for name, value in found.items() if name.endswith("_proj.weight") and isinstance(value, torch.Tensor)}
    assert kept == {
        "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight",
    }  # fmt: skip
    assert {name.removesuffix(".weight") for name in kept} | {"lm_head", "model.embed_tokens"} == set(config["ignore"])
    logits(out)


def test_several_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = convert(folder, tmp_path / "whole", "--quantization", "w4a16")
    monkeypatch.setattr("anycore.models.convert.writer.SHARD", 100_000)
    out = convert(folder, tmp_path / "out", "--quantization", "w4a16")
    assert len(list(out.glob("*.safetensors"))) > 2
    assert torch.equal(logits(out), logits(whole))


def test_dense_again(folder: Path, tmp_path: Path) -> None:
    """From a quantised checkpoint without --quantization: what its weights stand for."""
    small = convert(folder, tmp_path / "small", "--quantization", "w8a8")
    out = convert(small, tmp_path / "out", "--dtype", "float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert not open_checkpoint(Source("out", out)).formats
    assert gap(logits(out), logits(small)) < 1e-5


def test_gguf(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(folder, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    out = convert(path, tmp_path / "out", "--dtype", "float32")
    assert gap(logits(out), logits(path)) < 1e-5
    from anycore.text.tokenizer import Tokenizer

    text = "The quick brown fox: 東京 1234"
    assert Tokenizer.from_source(locate(str(out))).encode(text) == Tokenizer.from_source(locate(str(path))).encode(text)


# Pickles and consolidated files


def test_pickled_weights(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (old / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    half = len(tensors) // 2
    for number, part in enumerate((list(tensors)[:half], list(tensors)[half:])):
        torch.save({name: tensors[name] for name in part}, old / f"pytorch_model-{number}.bin")
    out = convert(old, tmp_path / "out")
    assert torch.equal(logits(out), logits(folder))
    assert (out / "tokenizer.json").is_file()
    for path in old.glob("*.bin"):
        path.unlink()
    torch.save({"epoch": 3, "state_dict": tensors}, old / "last.ckpt", _use_new_zipfile_serialization=False)
    assert torch.equal(logits(convert(old / "last.ckpt", tmp_path / "again")), logits(folder))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_pickle_that_runs_code(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((folder / "config.json").read_bytes())
    (old / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Evil()}))
    refused(capsys, [str(old), str(tmp_path / "out")], "pytorch_model.bin", "more than weights")
    torch.save(load_file(folder / "model.safetensors"), old / "pytorch_model.bin")
    content = (old / "pytorch_model.bin").read_bytes()
    (old / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    refused(capsys, [str(old), str(tmp_path / "out")], "pytorch_model.bin", "damaged")


META = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def meta_name(name: str) -> str:
    for ours, meta in META.items():
        name = name.replace(ours, meta)
    return name


def meta_folder(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The weights under Meta's names, queries and keys in the pairs that it rotates; params.json into `out`."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for part, count in heads.items():
            if part in name:
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        tensors[meta_name(name)] = tensor
    tensors["rope.freqs"] = torch.ones(4)
    out.mkdir()
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "head_dim": config["head_dim"], "norm_eps": config["rms_norm_eps"],
        "vocab_size": -1, "max_seq_len": config["max_position_embeddings"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    (out / "params.json").write_text(json.dumps(params))
    return tensors


@pytest.mark.parametrize("layout", ["meta", "meta, llama 3", "mistral"])
def test_consolidated(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Meta divides matrices among files, embeddings by columns (by rows since Llama 3); Mistral has one safetensors."""
    folder = tiny.tiny_lm(tmp_path / "hf", layers=2, tied=False, vocab=448)
    old = tmp_path / "old"
    tensors = meta_folder(folder, old)
    if layout == "mistral":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, old / "consolidated.safetensors")
    else:
        for number in range(2):
            part = {}
            for name, tensor in tensors.items():
                by_columns = name.endswith(("wo.weight", "w2.weight"))
                by_columns |= name.startswith("tok_embeddings") and layout == "meta"
                part[name] = tensor if tensor.dim() == 1 else tensor.chunk(2, 1 if by_columns else 0)[number].clone()
            torch.save(part, old / f"consolidated.0{number}.pth")
    refused(capsys, [str(old), str(tmp_path / "out")], "--model-type")
    out = convert(old, tmp_path / "out", "--model-type", "llama")
    assert torch.equal(logits(out), logits(folder))
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 512
    assert config["tie_word_embeddings"] is False


def test_a_rotary_embedding_scaled_by_nobody_knows_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1)
    old = tmp_path / "old"
    torch.save(meta_folder(folder, old), old / "consolidated.00.pth")
    params = json.loads((old / "params.json").read_text())
    (old / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    refused(capsys, [str(old), str(tmp_path / "out"), "--model-type", "llama"], "use_scaled_rope", "config.json")


# Refusals


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "precious").write_text("kept")
    refused(capsys, [str(folder), str(there)], "is there already")
    assert (there / "precious").read_text() == "kept"
    out = str(tmp_path / "out")
    refused(capsys, [str(folder), out, "--quantization", "w4a16", "--keep-dense", "layers.9.*"], "layers.9.*")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused(capsys, [str(folder), out, "--quantization", "fp8", "--calibration", str(short)], "w8a8 or w4a16")
    refused(capsys, [str(folder), out, "--quantization", "w4a16", "--calibration", str(short)], "tokens")
    refused(
        capsys, [str(folder), out, "--quantization", "w4a16", "--calibration", str(tmp_path / "no")], "cannot be read"
    )
    for words in (["--group", "64"], ["--group", "32", "--quantization", "w8a8"]):  # were left out without a word
        refused(capsys, [str(folder), out, *words], "--group belongs to --quantization w4a16")
    for words in (["--tables"], ["--keep-dense", "layers.0.*"]):
        refused(capsys, [str(folder), out, *words], f"{words[0]} belongs to --quantization")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(capsys, [str(empty), out], "holds no weights")


def test_a_full_disk_is_told_as_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("anycore.models.convert.writer.save_file", full)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 1
    text = capsys.readouterr().err
    assert "anycore: No space left on device" in text
    assert "internal error" not in text
    assert not list(tmp_path.iterdir())


def test_an_interruption_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anycore.models.convert.writer.Shards.close", interrupt)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 130
    assert not list(tmp_path.iterdir())
