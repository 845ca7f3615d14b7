"""Prompts that ask for what stands in the middle: each family's tokens and order, spaces, cuts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from anycore.errors import BadRequest, ContextLengthExceeded, Unsupported
from anycore.text.fim import FAMILIES, infill_of, render_infill
from anycore.text.tokenizer import Tokenizer

LETTERS = [chr(c) for c in range(32, 127)]


def bytes_tokenizer(*special: str) -> Tokenizer:
    """A token a character, BOS first, and these special tokens."""
    backend = Backend(models.BPE({"\u0120": 0, **{c: i for i, c in enumerate(LETTERS[1:], 1)}}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", *special)])
    from tokenizers import processors

    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"})


def pieces_tokenizer(*special: str) -> Tokenizer:
    """As sentencepiece: a text begins with a space of its own."""
    vocab = {"<unk>": 0, "▁": 1, "☺": 2, **{c: i for i, c in enumerate(LETTERS[1:], 3)}}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, special_tokens={})


def renderer(tokenizer: Tokenizer, longest: int = 64) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, max_model_len=longest, spec=SimpleNamespace(vocab_size=tokenizer.vocab_size)
    )


def written(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.backend.id_to_token(i) for i in ids)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
def test_every_family_has_its_tokens_order_and_ends(family: Any) -> None:
    marks = [token for token in (family.prefix, family.suffix, family.middle) if token]
    tokenizer = bytes_tokenizer(*marks, *family.ends)
    got = render_infill(renderer(tokenizer), "ab", "cd").token_ids
    first, second = f"{family.prefix}ab", f"{family.suffix}cd"
    order = second + first if family.suffix_first else first + second
    assert written(tokenizer, got) == f"<s>{order}{family.middle}"
    assert infill_of(tokenizer).ends == tuple(tokenizer.id_of(token) for token in family.ends)
    bare = render_infill(renderer(tokenizer), "ab", "cd", add_special_tokens=False).token_ids
    assert bare == got[1:]


def test_a_part_of_the_tokens_is_not_enough() -> None:
    with pytest.raises(Unsupported, match="fim_prefix") as caught:
        infill_of(bytes_tokenizer("<fim_prefix>", "<fim_suffix>"))
    assert caught.value.param == "suffix"


def test_a_suffix_gets_no_space_from_the_vocabulary() -> None:
    tokenizer = pieces_tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    assert tokenizer.drops_first_space
    got = render_infill(renderer(tokenizer), "a b", "c d").token_ids
    assert written(tokenizer, got) == "▁<PRE>▁a▁b▁<SUF>c▁d▁<MID>"


@pytest.mark.parametrize("codestral", [False, True])
def test_what_is_cut_is_the_far_end_of_prefix_or_suffix(codestral: bool) -> None:
    marks = ("[PREFIX]", "[SUFFIX]") if codestral else ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    tokenizer = bytes_tokenizer(*marks)
    whole = render_infill(renderer(tokenizer), "abcdef", "uvwxyz").token_ids

    def cut(**options: Any) -> str:
        got = render_infill(renderer(tokenizer), "abcdef", "uvwxyz", **options)
        assert got.truncated
        return written(tokenizer, got.token_ids)

    left, right = cut(truncate=len(whole) - 2), cut(truncate=len(whole) - 2, side="right")
    assert "cdef" in left
    assert "bcdef" not in left
    assert "uvwxyz" in left
    assert "uvwx" in right
    assert "uvwxy" not in right
    assert "abcdef" in right
    with pytest.raises(ContextLengthExceeded):
        cut(truncate=5)
    with pytest.raises(ContextLengthExceeded):
        render_infill(renderer(tokenizer, longest=8), "abcdef", "uvwxyz", room=1)
    with pytest.raises(BadRequest):
        cut(truncate=3, side="middle")
