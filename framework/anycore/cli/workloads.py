"""The benchmark workloads: prompts and texts that any other engine can be given too, token for token.

G1 one stream, G2 many prompts at once, G3 a shared prefix; E1 a pile of texts, E2 single texts; R1 documents for a
query.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Ids = list[int]

LICENCES = Path("/usr/share/common-licenses")
FILES = ("GPL-2", "GPL-3", "LGPL-2.1", "Apache-2.0", "GFDL-1.3")
SYLLABLES = ("ba", "con", "de", "fer", "ing", "lo", "mis", "ni", "or", "pre", "qua", "ro", "sta", "ter", "un", "ver")

TEXT_TOKENS = 126  # with [CLS] and [SEP] 128
SHORT_TOKENS = 14


@dataclass(frozen=True, slots=True)
class Generation:
    """A workload of prompts: `prompts(ids, run)` cuts them out of the corpus, another place in every run."""

    prompts: Callable[[Ids, int], list[Ids]]
    new_tokens: int


def corpus() -> str:
    """English prose that every Debian has: the common licences. Elsewhere made-up words, the same everywhere."""
    if all((LICENCES / name).is_file() for name in FILES):
        return "\n".join((LICENCES / name).read_text(encoding="utf-8") for name in FILES)
    made = random.Random(0)
    words = ["".join(made.choices(SYLLABLES, k=made.randint(1, 4))) for _ in range(4000)]
    return " ".join(made.choices(words, k=40000))


def slices(ids: Ids, lengths: list[int], seed: int) -> list[Ids]:
    """Pieces of the corpus with these lengths, at seeded places."""
    chosen = random.Random(seed)
    starts = [chosen.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def one_stream(ids: Ids, run: int) -> list[Ids]:
    return slices(ids, [128], 100 + run)


def many_streams(ids: Ids, run: int) -> list[Ids]:
    lengths = random.Random(200)  # the same lengths in every run, other texts
    return slices(ids, [lengths.randint(64, 256) for _ in range(32)], 200 + run)


def shared_prefix(ids: Ids, run: int) -> list[Ids]:
    prefix = slices(ids, [1024], 300 + run)[0]
    return [prefix + tail for tail in slices(ids, [32] * 16, 400 + run)]


GENERATIONS = {
    "G1": Generation(one_stream, 128),
    "G2": Generation(many_streams, 128),
    "G3": Generation(shared_prefix, 32),
}

TASKS = {"G1": "generate", "G2": "generate", "G3": "generate", "E1": "embed", "E2": "embed", "R1": "rerank"}
"""Workloads by name, and the task that a model must be opened for."""


def texts(ids: Ids, decode: Callable[[Ids], str], count: int, tokens: int = TEXT_TOKENS, seed: int = 7) -> list[str]:
    """`count` texts of about so many tokens, special ones not counted."""
    return [decode(piece) for piece in slices(ids, [tokens] * count, seed)]
