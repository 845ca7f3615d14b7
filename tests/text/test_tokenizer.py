"""The tokenizer against Hugging Face's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from anycore.errors import BadRequest, ConfigError, SourceError
from anycore.models.source import Source
from anycore.text.tokenizer import Tokenizer, byte_alphabet

TEXTS = [
    "Hello, world!",
    "  two  spaces\tand\n\nlines ",
    "🫠щ龜e\u0301👩‍👩‍👧",
    "<|begin|>literal special<|im_end|>",
    "yes",
    "",
]


def read(folder: Path) -> Tokenizer:
    return Tokenizer.from_source(Source(str(folder), folder))


@pytest.fixture(scope="module", params=["t_lm", "t_bert", "t_xlmr", "t_qemb", "t_qrr"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_ids_equal_hugging_face(folder: Path) -> None:
    ours, theirs = read(folder), AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        expected = [theirs(text, add_special_tokens=special)["input_ids"] for text in TEXTS]
        assert [ours.encode(text, add_special_tokens=special) for text in TEXTS] == expected
        assert ours.encode_batch(TEXTS, add_special_tokens=special) == expected
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


def test_decoding_equals_hugging_face(folder: Path) -> None:
    ours, theirs = read(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", ["t_ce", "t_ce_xlmr"])
def test_e06_pairs_equal_hugging_face(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    ours, theirs = read(folder), AutoTokenizer.from_pretrained(folder)
    for query, document in [("capital of France?", "Paris is the capital."), ("yes", ""), ("a b", "no dog here 🫠")]:
        # As a batch: the call for one pair takes an empty second text for none at all.
        expected = {name: rows[0] for name, rows in theirs([query], [document]).items()}
        (pair,) = ours.encodings([(query, document)])
        assert pair.ids == expected["input_ids"]
        assert (pair.type_ids if ours.token_types else None) == expected.get("token_type_ids")
    first, second = theirs.convert_tokens_to_ids(["</s>", "[SEP]"])
    middle = [first, first] if kind == "t_ce_xlmr" else [second]
    plain = ours.encode("the dog", add_special_tokens=False)
    assert ours.encodings([("the dog", "the dog")])[0].ids[1:-1] == plain + middle + plain


def test_pad_and_truncation_of_the_file_are_off(t_bert: Path, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2's tokenizer.json pads and cuts to 128; a server must see the whole text."""
    folder = tmp_path / "bert"
    shutil.copytree(t_bert, folder)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    file.write_text(json.dumps(data))
    assert len(read(folder).encode("the dog " * 20)) == 42
    assert len(read(folder).encode("the dog")) == 4


def test_bytes_of_tokens(t_lm: Path) -> None:
    tokenizer = read(t_lm)
    ids = tokenizer.encode("a 🫠", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "a 🫠".encode()
    assert any(tokenizer.token(i) == "\ufffd" for i in ids)
    assert tokenizer.token(tokenizer.encode("is the", add_special_tokens=False)[-1]) == " the"
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_sentencepiece_bytes_and_spaces(tmp_path: Path) -> None:
    """Llama 2's kind of vocabulary: ▁ for spaces, <0x0A> for bytes, a space before the first word that is not text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi", "<end>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<end>"})
    for text in ("hi hi", "hi 🫠\nhi", " hi", "<end>hi"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == backend.decode(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.token(vocab["▁hi"]) == " hi"
    assert tokenizer.token_bytes(vocab["<0xF0>"]) == b"\xf0"


def test_lone_surrogates_are_refused(t_lm: Path) -> None:
    tokenizer = read(t_lm)
    for call in (
        tokenizer.encode,
        tokenizer.located,
        lambda t: tokenizer.encode_batch([t]),
    ):
        with pytest.raises(BadRequest, match="surrogate at character 2"):
            call("ab\ud83e")


def test_code_from_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}, "tokenizer_class": "XTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit('the code of a checkpoint ran')")
    with pytest.raises(
        ConfigError, match=r"code that the checkpoint carries.*tokenization_x\.XTokenizer.*never runs it"
    ):
        read(tmp_path)


def test_a_tokenizer_that_is_absent_or_damaged_says_so(t_lm: Path, tmp_path: Path) -> None:
    shutil.copy(t_lm / "config.json", tmp_path)
    with pytest.raises(SourceError, match=r"holds no tokenizer, such as a tokenizer\.json: fetch"):
        read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match=r"the tokenizer in .* \(tokenizer\.json\) cannot be read: KeyError"):
        read(tmp_path)
