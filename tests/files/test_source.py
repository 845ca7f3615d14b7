"""Finding a model: paths, folders, GGUF files, and what must never be read or asked for (O11, O15)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tiny
from tiny_gguf import write_gguf

from anycore.errors import SourceError, WeightsError
from anycore.models import hub
from anycore.models.loader import check
from anycore.models.source import Source, locate
from anycore.models.spec import read_spec

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, *_: object) -> Path:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr(hub, "fetch_hub", asked)
    monkeypatch.setattr(hub, "fetch_modelscope", asked)


def test_folder(t_lm: Path) -> None:
    source = locate(str(t_lm))
    assert source == Source(str(t_lm), t_lm, None)
    assert source.config()["architectures"] == ["LlamaForCausalLM"]
    assert source.read_json("tokenizer_config.json")["eos_token"] == tiny.EOS
    assert source.read_json("1_Pooling/config.json") is None
    assert source.weight_bytes() == (t_lm / "model.safetensors").stat().st_size


def test_nested_companion(t_bert: Path) -> None:
    assert locate(str(t_bert)).read_json("1_Pooling/config.json")["pooling_mode_mean_tokens"] is True


def test_gguf_file_and_folder_with_a_single_one(tmp_path: Path, t_lm: Path) -> None:
    path = write_gguf(t_lm, tmp_path / "tiny.gguf")
    assert locate(str(path)) == Source(str(path), tmp_path, path)
    assert locate(str(tmp_path)) == Source(str(tmp_path), tmp_path, path)
    assert locate(str(path)).weight_bytes() == path.stat().st_size
    path.rename(tmp_path / "without-ending")
    assert locate(str(tmp_path / "without-ending")).config()["model_type"] == "llama"


def test_a_gguf_does_not_take_its_neighbours_for_its_own(tmp_path: Path, t_lm: Path) -> None:
    path = write_gguf(t_lm, tmp_path / "tiny.gguf")
    tiny.write_json(tmp_path / "config.json", {"architectures": ["Other"]})
    tiny.write_json(tmp_path / "modules.json", [])
    source = locate(str(path))
    assert source.config()["architectures"] == ["LlamaForCausalLM"]
    assert source.read_json("modules.json") is None
    assert source.path("config.json") is None


def test_folder_with_several_ggufs_lists_them(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(SourceError, match=r"holds 2 GGUF files.*a\.gguf, b\.gguf"):
        locate(str(tmp_path))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"neither a config\.json nor a GGUF file"):
        locate(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "notes.txt"])
def test_a_file_that_is_no_gguf(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SourceError, match="not a GGUF file; give the folder"):
        locate(str(tmp_path / name))


@pytest.mark.parametrize(
    "model",
    [
        "./missing", "/missing", "../missing", "~/missing-model", "missing/", "missing.gguf", "owner/missing.gguf",
        "owner/../../etc", "a/b/c", "models/tiny/model.safetensors", "C:\\models\\tiny", ".", "..\\x",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_hub")
def test_o15_a_mistyped_path_does_not_go_to_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SourceError, match=r"does not exist|neither a config"):
        locate(model)


@pytest.mark.parametrize(
    "model",
    [
        "",
        " ",
        " x",
        "x ",
        "a\0b",
        "owner/na me",
        "owner//x",
        "-x/y",
        "x--y",
        "owner/.x",
        "http://host/x",
        "é/x",
        "x" * 5000,
        "~nobody-here/x",
    ],
)
def test_o15_what_is_no_model_name_is_refused_without_asking_anyone(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SourceError):
        locate(model)


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", "a/../../secret.json", "..", "", "a\\..\\b", "a\0"])
def test_o15_companions_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.write_json(folder / "config.json", {})
    tiny.write_json(tmp_path / "secret.json", {"secret": 1})
    with pytest.raises(SourceError, match="not a name inside the model's folder"):
        locate(str(folder)).read_json(name)


def test_o15_an_index_cannot_name_files_outside(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "m" / "config.json", {})
    tiny.write_json(tmp_path / "m" / "model.safetensors.index.json", {"weight_map": {"a": "../outside.safetensors"}})
    with pytest.raises(SourceError, match="not a name inside"):
        locate(str(tmp_path / "m")).weight_bytes()


def test_weight_bytes_counts_the_shards_that_the_index_names(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", {})
    for name, size in (("model-1.safetensors", 100), ("model-2.safetensors", 50), ("other.safetensors", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    tiny.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert locate(str(tmp_path)).weight_bytes() == 150


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_o11_lfs_pointer_and_empty_companion(name: str, tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(WeightsError, match=rf"{name} is a Git LFS pointer.*1234567 bytes"):
        locate(str(tmp_path)).read_json(name)
    (tmp_path / name).write_text("")
    with pytest.raises(WeightsError, match=rf"{name} is empty"):
        locate(str(tmp_path)).read_json(name)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "model.safetensors"])
def test_o11_a_link_without_its_file(name: str, t_bert: Path, tmp_path: Path) -> None:
    """A cache whose blobs were cleared: a companion that is gone must not read as one that was never there."""
    folder = shutil.copytree(t_bert, tmp_path / "m")
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/0123")
    with pytest.raises(WeightsError, match=r"link to \.\./\.\./blobs/0123, which is not there"):
        check(locate(str(folder)), read_spec(locate(str(folder))))


def test_o11_weights_that_are_a_folder(t_lm: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(t_lm, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match="Is a directory"):
        check(locate(str(folder)), read_spec(locate(str(folder))))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "not a JSON object"), ("[" * 10**5, "JSON")]
)
def test_a_damaged_config_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match=message) as caught:
        locate(str(tmp_path)).config()
    assert str(tmp_path) in caught.value.message


def test_phases_of_use_import_only_what_they_need(t_lm: Path) -> None:
    program = (
        "import sys; from anycore.models.source import locate; import anycore.models.catalog\n"
        f"locate({str(t_lm)!r}).config()\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_reading_a_gguf_header_needs_no_torch(tmp_path: Path, t_lm: Path) -> None:
    path = write_gguf(t_lm, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    program = (
        "import sys, json; from anycore.models.source import locate\n"
        f"config = locate({str(path)!r}).config(); assert 'torch' not in sys.modules; print(json.dumps(config))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["num_hidden_layers"] == 4
