"""What is sent to a server, and when: conversations made from a seed, or read from a file, and their arrival times.

A conversation is one request, or several turns of a chat, each sent with all that was said before it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from anycore.errors import ConfigError

PATHS = {
    "completions": "completions",
    "chat": "chat/completions",
    "embeddings": "embeddings",
    "rerank": "rerank",
}
"""What is asked of the server, and the path below the base URL."""

GENERATING = ("completions", "chat")
TRACE_BLOCK = 512
"""Tokens that one of a recorded trace's `hash_ids` stands for."""

Range = tuple[int, int]
Body = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of a file: what is said, turn by turn, and how much is to be answered."""

    prompts: tuple[Any, ...]
    max_tokens: int | None = None
    at: float | None = None  # seconds from the first line's arrival


@dataclass(frozen=True)
class Load:
    """One benchmark's requests; equal loads make equal requests, whichever process makes them."""

    url: str  # with /v1
    model: str
    endpoint: str = "completions"
    num_prompts: int = 256
    input_len: Range = (100, 1024)
    output_len: Range = (100, 1024)
    prefix_len: int = 0  # tokens that prompts share, before their own
    num_prefixes: int = 1  # so many different ones, one of which each prompt begins with
    turns: Range = (1, 1)  # requests of a conversation
    vocab_size: int = 10_000
    documents: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration: float | None = None  # seconds in which conversations begin; they then decide how many there are
    seed: int = 0
    file: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every body
    api_key: str = field(default="", repr=False)
    timeout: float = 600.0

    @property
    def target(self) -> str:
        return f"{self.url}/{PATHS[self.endpoint]}"

    @property
    def streamed(self) -> bool:
        return self.endpoint in GENERATING

    @cached_property
    def recorded(self) -> bool:
        """Whether the file says when its requests come."""
        return bool(self.rows) and self.rows[0].at is not None

    @property
    def number(self) -> int | None:
        """Conversations; None: as many as begin within the duration, each where another has ended."""
        if self.recorded:
            return sum(self.duration is None or (row.at or 0.0) <= self.duration for row in self.rows)
        if self.duration is None:
            return self.num_prompts
        return None if math.isinf(self.request_rate) else max(1, round(self.request_rate * self.duration))

    @cached_property
    def arrivals(self) -> list[float]:
        """Seconds from the start to each conversation: gamma-distributed gaps, scaled so that the mean rate is exact.

        A burstiness of 1 is a Poisson process; less is burstier, more is more even.
        """
        number = self.number or 0
        if self.recorded:
            return [row.at or 0.0 for row in self.rows[:number]]
        if math.isinf(self.request_rate):
            return [0.0] * number
        rng = random.Random(self.seed)
        times = list(accumulate(rng.gammavariate(self.burstiness, 1.0) for _ in range(number)))
        scale = number / self.request_rate / times[-1]
        return [time * scale for time in times]

    def conversations(self, first: int = 0, step: int = 1) -> Iterator[tuple[float, list[Body]]]:
        """Arrival times and turns of every `step`-th conversation."""
        if self.number is None:
            return ((0.0, self.conversation(index)) for index in count(first, step))
        return ((self.arrivals[index], self.conversation(index)) for index in range(first, self.number, step))

    def bodies(self) -> list[Body]:
        """The JSON bodies of all first turns, in the order of their arrivals."""
        return [turns[0] for _, turns in islice(self.conversations(), self.num_prompts)]

    def conversation(self, index: int) -> list[Body]:
        """The JSON bodies of one conversation's turns, each without what was said before."""
        rng = random.Random(f"{self.seed} {index}")
        if self.rows:
            row = self.rows[index % len(self.rows)]
            said = row.prompts[: rng.randint(*self.turns)]
            return [self._body(prompt, row.max_tokens or rng.randint(*self.output_len)) for prompt in said]
        if self.endpoint == "rerank":
            pile = [self._prompt(rng, rng.randint(*self.input_len)) for _ in range(self.documents)]
            return [self._common() | {"query": self._prompt(rng, 16), "documents": pile}]
        turns = []
        for turn in range(rng.randint(*self.turns)):
            prompt, new_tokens = self._prompt(rng, rng.randint(*self.input_len)), rng.randint(*self.output_len)
            if self.prefix_len and turn == 0:
                shared = random.Random(f"{self.seed} prefix {rng.randrange(self.num_prefixes)}")
                prompt = self._prompt(shared, self.prefix_len) + prompt
            turns.append(self._body(prompt, new_tokens))
        return turns

    def _prompt(self, rng: random.Random, length: int) -> Any:
        """So many ids where the route takes ids, else so many words."""
        if self.endpoint in ("completions", "embeddings"):
            lowest = min(100, self.vocab_size // 4)  # special tokens stand below, mostly
            return [rng.randrange(lowest, self.vocab_size) for _ in range(length)]
        return "".join(f" {rng.randrange(1000)}" for _ in range(length))

    def _common(self) -> Body:
        return {"model": self.model} | self.extra

    def _body(self, prompt: Any, new_tokens: int) -> Body:
        if isinstance(prompt, Traced):
            prompt = self._traced(prompt)
        if self.endpoint == "embeddings":
            return self._common() | {"input": prompt}
        asked = (
            {"prompt": prompt}
            if self.endpoint == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        counted = {
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._common() | asked | counted

    def _traced(self, prompt: Traced) -> Any:
        """A prompt of a trace's length; where two have a hash in common, they have those tokens in common."""
        parts = [self._prompt(random.Random(f"{self.seed} block {key}"), TRACE_BLOCK) for key in prompt.blocks]
        own = self._prompt(random.Random(f"{self.seed} {prompt}"), max(0, prompt.length - TRACE_BLOCK * len(parts)))
        whole = [token for part in (*parts, own) for token in (part if isinstance(part, list) else part.split())]
        return whole[: prompt.length] if isinstance(own, list) else " ".join(whole[: prompt.length])

    @cached_property
    def rows(self) -> list[Row]:
        """The file: one JSON object a line, or ShareGPT's list of them.

        An object has `prompt` (text or ids) and perhaps `max_tokens` and `at`; or ShareGPT's `conversations`, of which
        empty ones are left out; or a trace's `timestamp` (milliseconds), `input_length`, `output_length` and
        `hash_ids`. Without `max_tokens` the length is drawn as for random prompts: no tokenizer is here to count a
        reply.
        """
        if self.file is None:
            return []
        found = [row for entry, where in _entries(self.file) if (row := _row(entry, where)) is not None]
        if not found:
            raise ConfigError(f"--workload {self.file} holds no prompts", param="workload")
        timed = sum(row.at is not None for row in found)
        if timed not in (0, len(found)):
            raise ConfigError(f"--workload {self.file}: {timed} of {len(found)} lines say when they come: all or none",
                              param="workload")  # fmt: skip
        return sorted(found, key=lambda row: row.at or 0.0)


@dataclass(frozen=True)
class Traced:
    """A prompt of which a trace tells the length and what it shares."""

    length: int
    blocks: tuple[int, ...]


def _entries(file: Path) -> Iterator[tuple[Any, str]]:
    """The objects of a file, and where each stands. Only a newline ends a line: texts may hold other separators."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # such as Windows writes
        if text.lstrip().startswith("["):
            yield from ((entry, f"{file}[{place}]") for place, entry in enumerate(json.loads(text)))
            return
    except OSError as error:
        raise ConfigError(f"--workload {file} cannot be read: {error.strerror}", param="workload") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--workload {file} is not UTF-8 (byte {error.start}): save it as UTF-8", param="workload"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--workload {file} begins as a list that is not JSON: {error}", param="workload") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line), f"{file}:{number}"
            except ValueError as error:
                raise ConfigError(f"{file}:{number} is not JSON: {error}", param="workload") from error


def _row(entry: Any, where: str) -> Row | None:
    """Read an object; None for a conversation in which nothing is said."""
    try:
        if "input_length" in entry:
            prompt = Traced(int(entry["input_length"]), tuple(entry.get("hash_ids", ())))
            return Row((prompt,), _count(entry, "output_length", where), entry["timestamp"] / 1e3)
        most, at = _count(entry, "max_tokens", where), _seconds(entry, where)
        if "prompt" in entry:
            return Row((_prompt(entry["prompt"], where),), most, at)
        said = entry["conversations"]
        mine = [turn["value"] for turn in said if turn.get("from", "human") in ("human", "user")]
        return Row(tuple(mine or [said[0]["value"]]), most, at) if said else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{where} is neither {{"prompt": ..., "max_tokens": ...}} nor {{"conversations": [{{"value": ...}}]}} nor '
            '{"timestamp": ..., "input_length": ..., "output_length": ...}',
            param="workload",
        ) from error


def _prompt(value: Any, where: str) -> str | list[int]:
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(token) is int for token in value)):
        return value
    raise ConfigError(f"{where}: prompt must be a text or a list of token ids", param="workload")


def _count(entry: dict[str, Any], name: str, where: str) -> int | None:
    """Tokens to generate, None where an object does not say."""
    value = entry.get(name)
    if value is None or (type(value) is int and value > 0):
        return value
    raise ConfigError(f"{where}: {name} must be a whole number of at least 1, not {value!r}", param="workload")


def _seconds(entry: dict[str, Any], where: str) -> float | None:
    value = entry.get("at")
    if value is None or (type(value) in (int, float) and 0 <= value < math.inf):
        return value
    raise ConfigError(f"{where}: at must be seconds, 0 or more, not {value!r}", param="workload")
