"""Weight files: damaged ones are refused before anything is served, and every parameter is loaded or tied."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reference import edit, gap, load, packed, plain_backend, prompts, theirs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from anycore.contract.formats import Format
from anycore.errors import WeightsError
from anycore.models import loader
from anycore.models.parameters import Parameter
from anycore.models.source import Source
from anycore.models.spec import read_spec

CONFIG = Qwen3Config(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
TEXT = prompts(96, 23)[0]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model in one file."""
    folder = tmp_path_factory.mktemp("single")
    torch.manual_seed(0)
    tiny.save_model(AutoModelForCausalLM.from_config(CONFIG), folder)
    return folder


@pytest.fixture(scope="module")
def sharded(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded model to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def logits(folder: Path) -> torch.Tensor:
    model = load(folder)
    with torch.inference_mode():
        return model.logits(packed(model, [TEXT])[0])


def refused(folder: Path, *words: str) -> None:
    """Both the check before loading and loading itself refuse, and say each of `words`."""
    source = Source(str(folder), folder)
    spec = read_spec(source)
    for attempt in (lambda: loader.check(source, spec), lambda: loader.load(source, spec, plain_backend(), "float32")):
        with pytest.raises(WeightsError) as caught:
            attempt()
        for word in words:
            assert word in caught.value.message


def test_o11_sharded_equals_single_bit_for_bit(single: Path, sharded: Path) -> None:
    assert torch.equal(logits(single), logits(sharded))


def test_o11_cut_at_the_end(folder: Path) -> None:
    path = shard(folder, 1)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - 1000)
    refused(folder, path.name, str(size), str(size - 1000), "1000 bytes are missing")


def test_o11_too_long(folder: Path) -> None:
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes() + b"tail")
    refused(folder, path.name, "too long")


def test_o11_cut_inside_the_header(folder: Path) -> None:
    path = shard(folder, 0)
    with open(path, "r+b") as file:
        file.truncate(40)
    refused(folder, path.name, "40")


def test_o11_shorter_than_a_header_length(folder: Path) -> None:
    shard(folder, 0).write_bytes(b"abc")
    refused(folder, shard(folder, 0).name, "3 in all")


def test_o11_header_of_garbage(folder: Path) -> None:
    path = shard(folder, 0)
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xfe{]"
    path.write_bytes(content)
    refused(folder, path.name, "header")


def test_o11_empty_file(folder: Path) -> None:
    shard(folder, 0).write_bytes(b"")
    refused(folder, shard(folder, 0).name, "empty")


def test_o11_git_lfs_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4567\n"
    shard(folder, 0).write_text(text)
    refused(folder, shard(folder, 0).name, "Git LFS pointer", "4567")


def test_o11_missing_shard(folder: Path) -> None:
    path = shard(folder, 1)
    path.unlink()
    refused(folder, path.name, "lacks 1 of")


def test_o11_index_names_a_tensor_that_no_shard_holds(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.7.mlp.up_proj.weight"] = shard(folder, 0).name
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "model.layers.7.mlp.up_proj.weight", shard(folder, 0).name)


def test_o11_index_leads_out_of_the_folder(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "../elsewhere.safetensors")


def test_o11_damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"lm_head')
    refused(folder, INDEX, "weight_map")


def test_o11_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(folder, "1 of", "layers.1.self_attn.k_proj.weight")


def test_o11_wrong_shape(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(64, 31)}))
    refused(folder, name, "[64, 31]", "[64, 32]")


def test_o11_duplicate_tensor_in_two_files(folder: Path) -> None:
    tensors = load_file(shard(folder, 0))
    first = next(iter(tensors))
    path = shard(folder, 1)
    save_file(load_file(path) | {first: tensors[first]}, path)
    refused(folder, first, path.name, shard(folder, 0).name)


def test_o11_duplicate_tensor_under_two_names(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}))
    refused(folder, "norm.weight", "twice")


def test_o11_duplicate_tensor_in_one_header(folder: Path) -> None:
    path = shard(folder, 0)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    name = next(name for name in json.loads(header) if name != "__metadata__")
    header = header[:-1] + b"," + json.dumps({name: json.loads(header)[name]}).encode()[1:]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    refused(folder, name, "twice")


def test_o11_overlapping_tensors(folder: Path) -> None:
    path = shard(folder, 1)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first, second = sorted(
        (name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refused(folder, path.name, "damaged")


def test_o11_extra_tensor_is_warned_about_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logits(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}))
    caplog.clear()
    assert torch.equal(logits(folder), before)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "model.layers.9.mlp.up_proj.weight" in warnings[0].getMessage()


def test_o11_integers_are_not_weights(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(WeightsError, match="quantised"):
        load(folder)


def test_o15_pickles_are_refused_with_advice(single: Path, tmp_path: Path) -> None:
    shutil.copy(single / "config.json", tmp_path)
    refused(tmp_path, "holds no weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path, "pytorch_model.bin", "refused", "safetensors")


def test_progress_ends_at_one(single: Path) -> None:
    seen: list[tuple[str, float]] = []
    source = Source("m", single)
    loader.load(source, read_spec(source), plain_backend(), "float32", lambda *report: seen.append(report))
    fractions = [fraction for phase, fraction in seen if phase == "weights"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


FLAGS: dict[str, dict[str, Any]] = {
    "true": {"tie_word_embeddings": True},
    "false": {"tie_word_embeddings": False},
    "absent": {},
    "nested": {"text_config": {"tie_word_embeddings": True}},
}


@pytest.mark.parametrize("head", ["present", "absent", "different"])
@pytest.mark.parametrize("flag", FLAGS)
def test_o12_tied_heads(flag: str, head: str, single: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`head` is what the file holds: the embedding table again, nothing, or another matrix."""
    folder = Path(shutil.copytree(single, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "present":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    edit(folder, drop=("tie_word_embeddings",))
    edit(folder, **FLAGS[flag])
    tied = flag in ("true", "nested")
    if head == "absent" and not tied:
        refused(folder, "lm_head.weight", "tie_word_embeddings")
        return
    ours = logits(folder)
    warned = "holds another lm_head.weight" in caplog.text
    assert warned == (tied and head == "different")
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(single)
        hidden = reference.model(torch.tensor([TEXT])).last_hidden_state[0]
        expected = hidden @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
    assert gap(ours, expected) < 1e-5


def test_o12_a_tied_head_is_not_held_twice(single: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(single, tmp_path / "copy"))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    edit(folder, tie_word_embeddings=True)
    model = load(folder)
    assert isinstance(model, loader.Decoder)
    assert model.head is not None
    assert model.head.handle.data_ptr() == model.table.data_ptr()


def test_o12_gemma_is_tied_when_nothing_says_so(tmp_path: Path) -> None:
    tiny.tiny_lm(tmp_path, family="gemma3", tied=True, layers=2)
    edit(tmp_path, drop=("tie_word_embeddings",))
    model = load(tmp_path)
    assert model.spec.tied
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert gap(model.logits(packed(model, [TEXT])[0]), theirs(reference, TEXT).logits[0]) < 1e-4


def test_base_model_without_prefix_or_head(single: Path, tmp_path: Path) -> None:
    """Names with and without "model." are the same; a bare model needs no head."""
    folder = Path(shutil.copytree(single, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    edit(folder, architectures=["Qwen3Model"])
    assert torch.equal(packed(load(folder), [TEXT])[0], packed(load(single), [TEXT])[0])


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors, written back as one file without an index."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


class Endless:
    """As many equal matrices as one asks for, cut in two; counts how many were asked for."""

    def __init__(self, wanted: list[Parameter]) -> None:
        self.shapes = {name: (rows, *p.shape[1:]) for p in wanted for name, rows in reversed(p.parts)}
        self.formats: dict[str, Format] = {}
        self.asked = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self.shapes.items():
            self.asked += 1
            yield name, torch.full(shape, float(self.asked))

    def file_of(self, name: str) -> str:
        return "memory"


def test_threads_read_ahead_but_never_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Parameter(f"m{i}.weight", (5, 4), ((f"m{i}.a.weight", 2), (f"m{i}.b.weight", 3))) for i in range(20)]
    checkpoint = Endless(wanted)
    backend = plain_backend()
    ahead: list[int] = []

    def upload(host: torch.Tensor) -> torch.Tensor:
        ahead.append(checkpoint.asked - 2 * len(ahead))
        return host

    monkeypatch.setattr(backend.memory, "upload", upload)
    monkeypatch.setattr(loader, "AHEAD", 3 * 5 * 4 * 4)  # three matrices
    found = loader.fill(wanted, checkpoint, "matrices", backend, "float32", None)
    assert len(ahead) == 20
    assert 2 < max(ahead) <= 2 * (3 + 1)
    for i in range(20):  # the second half comes first
        assert found[f"m{i}.weight"][:, 0].tolist() == [2.0 * i + 2] * 2 + [2.0 * i + 1] * 3
