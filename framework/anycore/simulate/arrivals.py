"""What is asked of a simulated server, and when: drawn from a seed, or read from a recorded file.

A token here is a number that stands for what it says and for all that stands before it, so that two prompts have a
number in common at a place exactly where they have the whole beginning up to there in common.
"""

from __future__ import annotations

import json
import math
import random
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import index
from pathlib import Path
from typing import Any

from anycore.bench.load import TRACE_BLOCK, Load, Range
from anycore.errors import ConfigError

PRIVATE = 1 << 62
"""Numbers from here on are of tokens that no other request has; hashes and shared prefixes lie below."""

MOST_TOKENS = 1 << 24
"""Tokens of a prompt or an answer: no model takes more, and each is held as a number."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the tokens that it adds to what was said, and how many are answered."""

    tokens: Sequence[int]
    output: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request, or several, each sent with the answers to those before it; `at` in seconds."""

    at: float
    turns: Sequence[Turn]
    priority: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests like those of `anycore bench serve` with the same settings: the same arrivals, lengths drawn alike."""

    count: int
    rate: float  # conversations a second; inf: all at once
    burstiness: float = 1.0  # 1: Poisson; less comes in bursts
    input_len: Range = (100, 1024)
    output_len: Range = (100, 1024)
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: Range = (1, 1)
    seed: int = 0

    def __iter__(self) -> Iterator[Conversation]:
        load = Load("", "", num_prompts=self.count, request_rate=self.rate, burstiness=self.burstiness, seed=self.seed)
        rng = random.Random(f"{self.seed} lengths")
        free = PRIVATE
        for at in load.arrivals:
            turns = []
            for number in range(rng.randint(*self.turns)):
                length, output = rng.randint(*self.input_len), rng.randint(*self.output_len)
                tokens: Sequence[int] = range(free, free + length)
                free += length
                if self.prefix_len and number == 0:
                    first = rng.randrange(self.num_prefixes) * self.prefix_len
                    tokens = [*range(first, first + self.prefix_len), *tokens]
                turns.append(Turn(tokens, output))
            yield Conversation(at, turns)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A file with a JSON object a line, in order of arrival.

    `at` (seconds) or `timestamp` (milliseconds); `prompt` as ids, or `input_length` with perhaps `hash_ids`, each of
    which stands for 512 tokens and for those before them; `max_tokens` or `output_length`; perhaps `priority` and
    `tenant`. `speed` divides the times.
    """

    file: Path
    speed: float = 1.0

    def __iter__(self) -> Iterator[Conversation]:
        free = PRIVATE
        before = 0.0
        with self.file.open("rb") as lines:
            for number, whole in enumerate(lines, 1):
                line = whole.removeprefix(BOM_UTF8)  # such as Windows writes
                if not line.strip():
                    continue
                where = f"{self.file}:{number}"
                try:
                    row = json.loads(line)
                    at = row["at"] if "at" in row else row["timestamp"] / 1e3
                    if not math.isfinite(at):
                        raise ValueError(f"{at} is no time")
                    at /= self.speed
                    output = _count(row["max_tokens"] if "max_tokens" in row else row["output_length"])
                    shared, own = _prompt(row)
                    priority, tenant = int(row.get("priority", 0)), str(row.get("tenant", ""))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(
                        f'{where} is neither {{"at": ..., "prompt": [ids], "max_tokens": ...}} nor {{"timestamp": ..., '
                        f'"input_length": ..., "output_length": ...}} ({type(error).__name__}: {error})',
                        param="workload",
                    ) from error
                if at < before:
                    raise ConfigError(f"{where} comes before the line above it: sort the file", param="workload")
                before = at
                if output < 1 or len(shared) + own < 1:
                    raise ConfigError(f"{where} has no prompt or no output", param="workload")
                tokens = [*shared, *range(free, free + own)]
                free += own
                yield Conversation(at, [Turn(tokens, output)], priority, tenant)


def _prompt(row: dict[str, Any]) -> tuple[list[int], int]:
    """The numbers of a prompt's tokens that others may have, too, and how many there are beside them."""
    if "prompt" in row:
        if not isinstance(row["prompt"], list):
            raise ValueError("a prompt must be token ids, for no tokenizer is here to count a text")
        return [number for number, _ in zip(chained(row["prompt"]), row["prompt"], strict=True)], 0
    length = _count(row["input_length"])
    starts = chained(row.get("hash_ids", ()))
    shared = list(chain.from_iterable(range(start, start + TRACE_BLOCK) for start in starts))[:length]
    return shared, length - len(shared)


def _count(value: Any) -> int:
    if not isinstance(value, int) or value > MOST_TOKENS:
        raise ValueError(f"{value!r} is no number of tokens: a whole one, of at most {MOST_TOKENS}")
    return value


def chained(parts: Sequence[Any]) -> Iterator[int]:
    """A number for each part that stands for it and all before it, below PRIVATE."""
    numbers = accumulate((index(part) for part in parts), lambda before, part: hash((before, part)), initial=0)
    next(numbers)
    return (number % PRIVATE for number in numbers)
