"""What is sent to a server, and when: requests made from a seed, or read from a file, and their arrival times."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
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

Range = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """One benchmark's requests; equal loads make equal requests, whichever process makes them."""

    url: str  # with /v1
    model: str
    endpoint: str = "completions"
    num_prompts: int = 256
    input_len: Range = (100, 1024)
    output_len: Range = (100, 1024)
    prefix_len: int = 0  # tokens that all prompts share, before their own
    vocab_size: int = 10_000
    documents: int = 100
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
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
    def arrivals(self) -> list[float]:
        """Seconds from the start to each request: gamma-distributed gaps, scaled so that the mean rate is exact.

        A burstiness of 1 is a Poisson process; less is burstier, more is more even.
        """
        if math.isinf(self.request_rate):
            return [0.0] * self.num_prompts
        rng = random.Random(self.seed)
        times = list(accumulate(rng.gammavariate(self.burstiness, 1.0) for _ in range(self.num_prompts)))
        scale = self.num_prompts / self.request_rate / times[-1]
        return [time * scale for time in times]

    def bodies(self) -> list[dict[str, Any]]:
        """The JSON bodies, in the order of their arrivals."""
        rng = random.Random(self.seed)
        if self.file is not None:
            return [self._body(prompt, length) for prompt, length in self._read(self.file, rng)]
        prefix = self._prompt(rng, self.prefix_len)
        made = []
        for _ in range(self.num_prompts):
            length, new_tokens = rng.randint(*self.input_len), rng.randint(*self.output_len)
            if self.endpoint == "rerank":
                query, pile = (
                    self._prompt(rng, 16),
                    [self._prompt(rng, rng.randint(*self.input_len)) for _ in range(self.documents)],
                )
                made.append(self._common() | {"query": query, "documents": pile})
                continue
            own = self._prompt(rng, length)
            made.append(self._body(prefix + own if prefix else own, new_tokens))
        return made

    def _prompt(self, rng: random.Random, length: int) -> Any:
        """So many ids where the route takes ids, else so many words."""
        if self.endpoint in ("completions", "embeddings"):
            lowest = min(100, self.vocab_size // 4)  # special tokens stand below, mostly
            return [rng.randrange(lowest, self.vocab_size) for _ in range(length)]
        return "".join(f" {rng.randrange(1000)}" for _ in range(length))

    def _common(self) -> dict[str, Any]:
        return {"model": self.model} | self.extra

    def _body(self, prompt: Any, new_tokens: int) -> dict[str, Any]:
        if self.endpoint == "embeddings":
            return self._common() | {"input": prompt}
        if self.endpoint == "rerank":
            raise ConfigError("--endpoint rerank has random documents only: leave --workload out", param="workload")
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

    def _read(self, path: Path, rng: random.Random) -> list[tuple[Any, int]]:
        """Prompts of a file with one JSON object a line, repeated until there are enough.

        An object has `prompt` (text or ids) and perhaps `max_tokens`, or ShareGPT's `conversations`, whose first turn
        is taken. Without `max_tokens` the length is drawn as for random prompts: no tokenizer is here to count a reply.
        """
        rows: list[tuple[Any, int | None]] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                rows.append(_row(line, f"{path}:{number}"))
        if not rows:
            raise ConfigError(f"--workload {path} holds no prompts", param="workload")
        repeated = rows * -(-self.num_prompts // len(rows))
        return [
            (prompt, length or rng.randint(*self.output_len)) for prompt, length in islice(repeated, self.num_prompts)
        ]


def _row(line: str, where: str) -> tuple[Any, int | None]:
    try:
        row = json.loads(line)
        prompt = row["prompt"] if "prompt" in row else row["conversations"][0]["value"]
        return prompt, row.get("max_tokens")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{where} is neither {{"prompt": ..., "max_tokens": ...}} nor {{"conversations": [{{"value": ...}}]}}',
            param="workload",
        ) from error
