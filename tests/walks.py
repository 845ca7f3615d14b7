"""Texts that a grammar allows, token by token at random, with a small tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tiny import EOS, save_bpe

from anycore.text.grammar import mark_tokens, speller, vocabulary
from anycore.text.replies.parts import Spell
from anycore.text.tokenizer import Tokenizer, from_folder


class Vocabulary:
    """A tokenizer of 448 tokens. `marks` are further ones."""

    def __init__(self, folder: Path, marks: list[str]) -> None:
        ids = save_bpe(folder, 448, prefix=[], extra=marks)
        self.tokenizer: Tokenizer = from_folder(folder)
        self.tokens: LLTokenizer = vocabulary(self.tokenizer, ids["size"], [ids[EOS]])
        self.end = ids[EOS]
        self.size = ids["size"]
        self.spell: Spell = speller(mark_tokens(self.tokenizer))


def walk(words: Vocabulary, grammar: str, seed: int = 0, limit: int = 1500) -> str | None:
    """Return such a text, which goes on where it could end for the first time; None if it has no end within `limit`."""
    form = grammar if grammar.startswith("{") else LLMatcher.grammar_from_lark(grammar)
    matcher = LLMatcher(words.tokens, form, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = allocate_token_bitmask(1, words.size)
    dice = random.Random(seed)
    tokens: list[int] = []
    ends = 0
    while len(tokens) < limit:
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: words.size])
        assert len(allowed), (words.tokenizer.decode(tokens, False), matcher.get_error())
        token = words.end
        if words.end in allowed:
            ends += 1
            if len(allowed) == 1 or ends > 1:
                return words.tokenizer.decode(tokens, skip_special_tokens=False)
        while token == words.end:
            token = int(dice.choice(allowed))
        assert matcher.consume_token(token)
        tokens.append(token)
    return None
