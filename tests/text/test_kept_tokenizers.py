"""Tokenizers that are kept for the next start: the same ones, read without transformers, and never out of date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import real_model
from tiny import edit_json

from anycore.models.source import Source
from anycore.text import folder_tokenizer, kept
from anycore.text.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!",
    "  two  spaces\tand\n\nlines ",
    "🫠щ龜e\u0301👩‍👩‍👧",
    "<|begin|>literal special<|im_end|><|im_start|>user\n<bos>[MASK]</s>",
    "def f(x):\n    return x**2  # 1234567",
    "",
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing is read by transformers."""

    def refuse(folder: Path) -> None:
        raise AssertionError(f"{folder} is read anew")

    monkeypatch.setattr(folder_tokenizer, "read", refuse)


def read(folder: Path) -> Tokenizer:
    return Tokenizer.from_source(Source(str(folder), folder))


def check_same(one: Tokenizer, other: Tokenizer) -> None:
    assert other.backend.to_str() == one.backend.to_str()
    assert other.backend.encode_special_tokens == one.backend.encode_special_tokens
    for name in ("special_tokens", "chat_templates", "token_types", "bos_id", "eos_id", "vocab_size", "special_ids"):
        assert getattr(other, name) == getattr(one, name), name
    assert other.added_ids == one.added_ids
    for special in (True, False):
        for text in TEXTS:
            ids = one.encode(text, special)
            assert other.encode(text, special) == ids
            assert other.decode(ids, skip_special_tokens=special) == one.decode(ids, skip_special_tokens=special)
            pairs = [tokenizer.encodings([(text, "b c")])[0] for tokenizer in (one, other)]
            assert pairs[0].ids == pairs[1].ids
            assert pairs[0].type_ids == pairs[1].type_ids


@pytest.mark.parametrize("kind", ["t_lm", "t_bert", "t_xlmr", "t_qemb", "t_qrr"])
def test_what_is_kept_is_the_same_tokenizer(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    first = read(folder)
    request.getfixturevalue("no_transformers")
    check_same(first, read(folder))


@pytest.mark.models
def test_a_real_model_is_kept_the_same(request: pytest.FixtureRequest) -> None:
    folder = real_model("minilm").folder
    first = read(folder)
    request.getfixturevalue("no_transformers")
    check_same(first, read(folder))


def test_split_special_tokens_are_kept(t_lm: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = Path(shutil.copytree(t_lm, tmp_path / "split"))
    edit_json(folder / "tokenizer_config.json", split_special_tokens=True)
    first = read(folder)
    assert first.backend.encode_special_tokens
    request.getfixturevalue("no_transformers")
    check_same(first, read(folder))


def test_a_second_reading_imports_neither_transformers_nor_torch(t_lm: Path) -> None:
    read(t_lm)
    program = (
        "import sys; from pathlib import Path; from anycore.text.folder_tokenizer import import_reader_for; "
        "from anycore.text.tokenizer import from_folder; folder = Path(sys.argv[1]); import_reader_for([folder]); "
        "assert from_folder(folder).encode('a b'); print({'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(t_lm)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "new.jinja"])
def test_a_changed_file_is_read_anew(name: str, t_lm: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(t_lm, tmp_path / "model"))
    before = kept.place_of(folder)
    if name.endswith(".json"):
        edit_json(folder / name, new_field=1)
    else:
        (folder / name).write_text("{{ messages }}")
    assert kept.place_of(folder) != before


def test_weights_and_hidden_files_do_not_count(t_lm: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(t_lm, tmp_path / "model"))
    before = kept.place_of(folder)
    (folder / "model.safetensors").write_bytes(b"others")
    (folder / ".lock").touch()
    assert kept.place_of(folder) == before
    assert kept.place_of(Path(shutil.copytree(folder, tmp_path / "elsewhere"))) != before


@pytest.mark.parametrize("damage", [b"", b"\x00\x01", b"half"])
def test_what_is_damaged_is_read_and_kept_anew(damage: bytes, t_lm: Path, own_cache: Path) -> None:
    first = read(t_lm)
    (place,) = own_cache.iterdir()
    good = place.read_bytes()
    place.write_bytes(good[: len(good) // 2] if damage == b"half" else damage)
    check_same(first, read(t_lm))
    assert place.read_bytes() == good


def test_a_backend_that_is_none_is_read_anew(t_lm: Path) -> None:
    first = read(t_lm)
    place = kept.place_of(t_lm)
    assert place is not None
    kept.keep(place, kept.Kept(False, {}, {}, False, backend="{}"))
    check_same(first, read(t_lm))


def test_a_folder_that_cannot_be_written_does_no_harm(t_lm: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text("a file where the folder would be")
    assert read(t_lm).encode("a b")


def test_a_large_file_of_unknown_kind_is_not_hashed(
    t_lm: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LARGEST", 100)
    assert kept.place_of(t_lm) is None
    assert read(t_lm).encode("a b")
    assert not own_cache.exists()


@pytest.mark.parametrize("limit", ["MOST", "MOST_BYTES"])
def test_the_longest_unused_ones_go(limit: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = kept.Kept(False, {}, {}, False)
    for number, age in enumerate((30, 10, 20)):
        kept.keep(own_cache / f"{number}.msgpack", one)
        os.utime(own_cache / f"{number}.msgpack", (age, age))
    kept.take(own_cache / "0.msgpack")  # used now
    size = (own_cache / "0.msgpack").stat().st_size
    monkeypatch.setattr(kept, limit, 2 if limit == "MOST" else 2 * size)
    kept.keep(own_cache / "3.msgpack", one)
    assert sorted(path.name for path in own_cache.iterdir()) == ["0.msgpack", "3.msgpack"]
