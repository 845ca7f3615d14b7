"""The tokenizer of a GGUF file gives the ids of the tokenizer it was made from."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tiny
from real_models import real_model
from tiny_gguf import write_gguf
from tokenizers import Regex, Tokenizer, pre_tokenizers

from anycore.errors import Unsupported, WeightsError
from anycore.text.gguf_tokenizer import PATTERNS, load_gguf_tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
ALPHABET = "abc THE the 0123 \n\t.,;!?'s'LL éüß щи 東京 😀🏳️‍🌈 \u200b  "


def texts(count: int = 300, alphabet: str = ALPHABET) -> list[str]:
    dice = random.Random(0)
    return tiny.CORPUS + ["".join(dice.choices(alphabet, k=dice.randint(0, 40))) for _ in range(count)]


def write(path: Path, edit: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write a file with a header alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_byte_level_ids_are_the_folders(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1)
    mine, info = load_gguf_tokenizer(write_gguf(folder, tmp_path / "m.gguf"))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*texts(), "<|im_start|>user\nyes<|im_end|>\n"]:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert mine.encode(text, add_special_tokens=special).ids == ids
        assert mine.decode(ids) == theirs.decode(ids)
        assert mine.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert {name: info[name] for name in ("bos_token", "eos_token", "pad_token")} == {
        "bos_token": tiny.BOS,
        "eos_token": tiny.EOS,
        "pad_token": tiny.PAD,
    }
    assert (info["add_bos_token"], info["add_eos_token"], info["model_max_length"]) == (True, False, 512)
    assert info["chat_template"] == tiny.CHAT_TEMPLATE


PIECES = {
    "gpt-2": ["It", "'s", " 1234", " x", "\n\n ", " y", "'", "LL"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n ", " y", "'", "LL"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " x", "\n\n", " ", " y", "'LL"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ", " y", "'LL"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " x", "\n\n", " ", " y", "'LL"],
    "default": ["It", "'", "s", " ", "123", "4", " x", "\n\n ", " y", "'", "LL"],
    "deepseek-coder": ["It", "'", "s", " ", "1", "2", "3", "4", " x", "\n", "\n", " ", " y", "'", "LL"],
}


@pytest.mark.parametrize("name", PIECES)
def test_pre_tokenizers_cut_text_as_their_models_do(name: str, tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1)
    tokenizer, _ = load_gguf_tokenizer(write_gguf(folder, tmp_path / "m.gguf", pre=name))
    text = "It's 1234 x\n\n  y'LL"
    pieces = [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == PIECES[name]


def test_every_pattern_of_the_table_compiles_and_loses_nothing() -> None:
    names = [name for group in PATTERNS for name in group]
    assert len(names) == len(set(names))
    for patterns in PATTERNS.values():
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
        for text in texts(50):
            assert "".join(piece for piece, _ in cut.pre_tokenize_str(text)) == text


def test_smollm_cuts_digits_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1, add_bos=False)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    mine, _ = load_gguf_tokenizer(write_gguf(folder, tmp_path / "m.gguf", pre="smollm"))
    for text in texts():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert mine.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_the_librarys(prefix: bool, tmp_path: Path) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.CORPUS * 4), model_writer=trained, model_type="bpe", vocab_size=400,
        byte_fallback=True, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
        normalization_rule_name="identity", character_coverage=0.98, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    places = range(theirs.get_piece_size())
    kinds = [
        6 if theirs.is_byte(i) else 3 if theirs.is_control(i) else 2 if theirs.is_unknown(i) else 1 for i in places
    ]

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([theirs.id_to_piece(i) for i in places])
        writer.add_token_scores([theirs.get_score(i) for i in places])
        writer.add_token_types(kinds)
        if not prefix:
            writer.add_add_space_prefix(False)

    mine, info = load_gguf_tokenizer(write(tmp_path / "m.gguf", describe))
    for text in texts(alphabet=ALPHABET.replace("\u200b", "")):
        ids = theirs.encode(text)
        assert mine.encode(text, add_special_tokens=False).ids == ids, text
        assert mine.encode(text).ids == [theirs.bos_id(), *ids]
        assert mine.decode(ids) == theirs.decode(ids)
    assert (info["bos_token"], info["eos_token"], info["unk_token"]) == ("<s>", "</s>", "<unk>")


def test_wordpiece_ids_are_the_folders(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path / "hf")
    mine, info = load_gguf_tokenizer(write_gguf(folder, tmp_path / "m.gguf"))
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        assert mine.encode(text).ids == theirs.encode(text).ids
        assert mine.encode(text).type_ids == theirs.encode(text).type_ids
        one, other = mine.encode(text, "the river"), theirs.encode(text, "the river")
        assert (one.ids, one.type_ids) == (other.ids, other.type_ids)
    assert (info["cls_token"], info["sep_token"]) == ("[CLS]", "[SEP]")


def test_flags_decide_what_is_put_around_a_text(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1, add_bos=False)
    path = write_gguf(folder, tmp_path / "m.gguf", edit=lambda w: w.add_add_eos_token(True))
    tokenizer, info = load_gguf_tokenizer(path)
    begin, end = tiny.SPECIAL.index(tiny.BOS), tiny.SPECIAL.index(tiny.EOS)
    inner = tokenizer.encode("yes", add_special_tokens=False).ids
    assert info["add_eos_token"]
    assert tokenizer.encode("yes").ids == [begin, *inner, end]
    assert tokenizer.encode("yes", "yes").ids == [begin, *inner, end] * 2


def test_several_chat_templates_keep_their_names(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = tiny.tiny_lm(tmp_path / "hf", layers=1, chat_template=False)
    path = write_gguf(folder, tmp_path / "m.gguf", edit=lambda w: w.add_chat_template(templates))
    assert load_gguf_tokenizer(path)[1]["chat_template"] == templates


def edit_tokens(**values: Any) -> Callable[[gguf.GGUFWriter], None]:
    return lambda w: [
        w.add_key_value(f"tokenizer.ggml.{k}", v, gguf.GGUFValueType.get_type(v)) for k, v in values.items()
    ]


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"model": "t5", "tokens": ["a"]}, Unsupported, "kind 't5'; known are gpt2, llama, bert"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a a"], "pre": "new-one"}, Unsupported, "'new-one'; known are"),
        ({"model": "gpt2", "tokens": ["a", "a"], "merges": ["a a"], "pre": "gpt-2"}, WeightsError, "1 words .* twice"),
        ({"model": "gpt2", "tokens": ["a"], "merges": ["a b"], "pre": "gpt-2"}, WeightsError, "does not fit together"),
        ({"model": "gpt2", "tokens": ["a"], "pre": "gpt-2"}, WeightsError, "merges"),
        ({"model": "llama", "tokens": ["a"] * 3}, WeightsError, "scores"),
        ({"model": "llama", "tokens": ["a"], "scores": [0.0]}, WeightsError, "bos token is number 1 of 1"),
        ({"model": "gpt2", "tokens": ["a"], "token_type": [1, 1]}, WeightsError, "1 words but types for 2"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(
    values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", edit_tokens(**values))
    with pytest.raises(error, match=message):
        load_gguf_tokenizer(path)


@pytest.mark.models
@pytest.mark.parametrize(("name", "golden"), [("smollm2", "smollm2-135m"), ("gemma3", "gemma3-270m")])
def test_real_models_give_the_golden_ids(name: str, golden: str) -> None:
    path = real_model(name).gguf
    assert path is not None
    tokenizer, info = load_gguf_tokenizer(path)
    outputs = json.loads((GOLDEN / f"{golden}-float32.json").read_text())["outputs"]
    assert outputs
    for output in outputs:
        assert tokenizer.encode(output["rendered"]).ids == output["prompt_ids"]
        assert tokenizer.decode(output["output_ids"]) == output["text"]
    assert tokenizer.decode(tokenizer.encode("In 1969, 42").ids) == "In 1969, 42"
    assert ("chat_template" in info) == (name == "smollm2")
