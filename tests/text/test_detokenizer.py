"""Streaming text and stop strings, compared with decoding everything at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from anycore.engine.request import FinishReason, SamplingParams
from anycore.errors import ConfigError
from anycore.models.source import Source
from anycore.text.detokenizer import Detokenizer, Piece, StopMatcher
from anycore.text.tokenizer import Tokenizer

HARD = "🫠щ龜e\u0301👩‍👩‍👧"
IDS = st.lists(st.integers(0, 460), max_size=60)  # some are outside the vocabulary of 448


@pytest.fixture(scope="module")
def tokenizer(t_lm: Path) -> Tokenizer:
    return Tokenizer.from_source(Source("t-lm", t_lm))


@pytest.fixture(scope="module")
def hugging_face(t_lm: Path):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(t_lm)


def stream(
    tokenizer: Tokenizer, ids: list[int], size: int = 1, end: FinishReason = FinishReason.LENGTH, **params: object
) -> list[Piece]:
    """Feed ids in chunks of `size`, the last one with the finish, until a stop string is found."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params), prompt_ids=[1])  # type: ignore[arg-type]
    pieces = []
    for start in range(0, max(len(ids), 1), size):
        last = start + size >= len(ids)
        pieces.append(detokenizer.feed(ids[start : start + size], end if last else None))
        if pieces[-1].stop is not None:
            break
    return pieces


def text_of(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a01_characters_of_several_tokens(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(HARD * 3, add_special_tokens=False)
    assert len(ids) > len(HARD) * 3
    pieces = stream(tokenizer, ids, size)
    assert text_of(pieces) == HARD * 3
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert sum(piece.tokens for piece in pieces) == len(ids)


def test_a01_characters_come_as_soon_as_they_are_whole(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    *begun, last = tokenizer.encode("🫠", add_special_tokens=False)
    assert all(detokenizer.feed([i]).text == "" for i in begun)
    assert detokenizer.feed([last]).text == "🫠"


def test_a01_cut_inside_a_character(tokenizer: Tokenizer) -> None:
    """Streamed and whole text do the same: one U+FFFD for the bytes of the unfinished character."""
    ids = tokenizer.encode("ok 🫠", add_special_tokens=False)[:-1]
    for size in (1, 3, 100):
        assert text_of(stream(tokenizer, ids, size)) == tokenizer.decode(ids) == "ok \ufffd"


@settings(deadline=None)
@given(ids=IDS, size=st.sampled_from([1, 3, 7, 100]), skip=st.booleans())
def test_a01_any_ids_equal_hugging_face(
    tokenizer: Tokenizer,
    hugging_face,
    ids: list[int],
    size: int,
    skip: bool,  # type: ignore[no-untyped-def]
) -> None:
    whole = hugging_face.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == whole
    assert text_of(stream(tokenizer, ids, size, skip_special_tokens=skip)) == whole
    if whole:
        position = 0
        for piece in stream(tokenizer, ids, size, skip_special_tokens=skip):
            assert whole.startswith(piece.text, position)
            position += len(piece.text)


def reference(
    text_after: list[str], stops: tuple[str, ...], min_tokens: int, include: bool
) -> tuple[str, str | None, int]:
    """Look for stop strings in the plainest way: text_after[i] is the decoded text after i + 1 tokens."""
    whole = text_after[-1] if text_after else ""
    for end in range(1, len(whole) + 1):
        tokens = next(i + 1 for i, text in enumerate(text_after) if len(text) >= end)
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found and tokens > min_tokens:
            stop = max(found, key=len)
            return whole[: end if include else end - len(stop)], stop, tokens
    return whole, None, len(text_after)


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from([72, 73, 74, 228, 225]), max_size=40),
    size=st.sampled_from([1, 2, 3, 7, 100]),
    stops=st.lists(st.text("cde Ġ\ufffd", min_size=1, max_size=4), min_size=1, max_size=4),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
def test_a02_stop_strings_equal_the_plain_search(
    tokenizer: Tokenizer, ids: list[int], size: int, stops: list[str], min_tokens: int, include: bool
) -> None:
    known = tuple(dict.fromkeys(stops))
    # What is unfinished counts only at the end, with the last token.
    plain = Detokenizer(tokenizer, SamplingParams())
    text, after = "", []
    for i, token in enumerate(ids):
        text += plain.feed([token], FinishReason.LENGTH if i == len(ids) - 1 else None).text
        after.append(text)
    expected, stop, tokens = reference(after, known, min_tokens, include)
    pieces = stream(tokenizer, ids, size, stop=known, min_tokens=min_tokens, include_stop_str_in_output=include)
    assert text_of(pieces) == expected
    assert pieces[-1].stop == stop
    assert sum(piece.tokens for piece in pieces) == tokens
    shown = ""
    for piece in pieces:
        shown += piece.text
        assert expected.startswith(shown)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_a02_stop_across_tokens(tokenizer: Tokenizer, size: int) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = text[6:24]  # begins and ends inside tokens, spans several
    pieces = stream(tokenizer, ids, size, stop=(stop,))
    assert text_of(pieces) == text[: text.index(stop)]
    assert pieces[-1].stop == stop
    kept = text_of(stream(tokenizer, ids, size, stop=(stop,), include_stop_str_in_output=True))
    assert kept == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a02_a_stop_that_never_completes_is_flushed(tokenizer: Tokenizer, size: int) -> None:
    text = "The quick brown fox"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for start in range(len(text)):
        assert text_of(stream(tokenizer, ids, size, stop=(text[start : start + 5] + "\x01",))) == text


def test_a02_nothing_is_held_longer_than_it_may_be_a_stop(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("quit",)))
    feed = lambda text: detokenizer.feed(tokenizer.encode(text, add_special_tokens=False)).text  # noqa: E731
    assert feed("The q") == "The "
    assert feed("ui") == ""
    assert feed("ck") == "quick"


def test_a02_earliest_match_wins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    for stops in [("three", "two"), ("two", "three")]:
        (piece,) = stream(tokenizer, ids, 100, stop=stops)
        assert (piece.text, piece.stop) == ("one ", "two")
    (piece,) = stream(tokenizer, ids, 100, stop=("wo", " two"))
    assert (piece.text, piece.stop) == ("one", " two")


def test_a02_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes no yes no", add_special_tokens=False)
    at = [i for i in range(len(ids)) if tokenizer.token(ids[i]).strip() == "no"]
    assert stream(tokenizer, ids, stop=("no",), min_tokens=at[0])[-1].stop == "no"
    pieces = stream(tokenizer, ids, 2, stop=("no",), min_tokens=at[0] + 1)
    assert text_of(pieces) == "yes no yes "
    assert sum(piece.tokens for piece in pieces) == at[1] + 1


def test_the_token_that_stops_is_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes no", add_special_tokens=False)
    last = tokenizer.token(ids[-1])
    assert text_of(stream(tokenizer, ids, end=FinishReason.STOP)) == "yes no".removesuffix(last)
    assert text_of(stream(tokenizer, ids, end=FinishReason.STOP, include_stop_str_in_output=True)) == "yes no"
    assert text_of(stream(tokenizer, ids, end=FinishReason.LENGTH)) == "yes no"


def test_after_the_end_nothing_comes(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("no",)))
    ids = tokenizer.encode("yes no yes", add_special_tokens=False)
    assert detokenizer.feed(ids).stop == "no"
    assert detokenizer.feed(ids, FinishReason.LENGTH) == Piece()


def test_work_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    """20,000 tokens of garbage that never ends a character, with a stop string that almost matches."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("ab" * 50 + "c",)))
    ids = tokenizer.encode("ab", add_special_tokens=False) + tokenizer.encode("🫠", add_special_tokens=False)[:1]
    early, *_, late = [calls(partial(detokenizer.feed, ids)) for _ in range(7000)]
    assert late <= 2 * early
    assert len(detokenizer._held) <= 101


def calls(action: Callable[[], object]) -> int:
    """How many functions it calls, Python's own included."""
    found = []
    sys.setprofile(lambda frame, event, argument: found.append(event))
    try:
        action()
    finally:
        sys.setprofile(None)
    return len(found)


def test_word_pieces_cannot_be_streamed(t_bert: Path) -> None:
    tokenizer = Tokenizer.from_source(Source("t-bert", t_bert))
    with pytest.raises(ConfigError, match="token by token"):
        Detokenizer(tokenizer, SamplingParams())


@settings(deadline=None)
@given(stop=st.text("ab", min_size=1, max_size=6), text=st.text("abc", max_size=30))
def test_matcher_finds_every_end(stop: str, text: str) -> None:
    matcher = StopMatcher(stop)
    assert [matcher.step(c) for c in text] == [text[: i + 1].endswith(stop) for i in range(len(text))]
