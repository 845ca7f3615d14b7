"""Engines over tiny models, and short ways to run requests through them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anycore import plugins
from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.engine import Engine
from anycore.engine.launch import build, prepare
from anycore.engine.request import Delta, NewRequest, PoolingParams, SamplingParams

LOADED = plugins.load()


def engine(folder: Path, *, overlap: bool = False, **settings: Any) -> Engine:
    """A float32 engine with a small pool, on the CPU unless said otherwise."""
    settings.setdefault("backend", "cpu")
    settings.setdefault("dtype", "float32")
    settings.setdefault("kv_cache_memory", 16 * 2**20)
    made = build(prepare(ModelConfig(model=str(folder), **settings), LOADED))
    made.runner.backend.overlap = overlap
    return made


@dataclass
class Output:
    """All that came out for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    cached: int = 0
    vector: np.ndarray | None = None
    scores: list[float] | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a delta after the last"
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.cached = max(self.cached, delta.cached_tokens)
        self.scores = delta.scores or self.scores
        self.stop_reason = delta.stop_reason
        self.error, self.error_code = delta.error, delta.error_code
        if delta.vector is not None:
            self.vector = np.frombuffer(delta.vector, dtype="<f4")
        self.finish = delta.finish.value if delta.finish else None


def request(name: str, tokens: list[int], task: Task = Task.GENERATE, **params: Any) -> NewRequest:
    """A greedy request of 12 tokens unless said otherwise; pooled tasks take PoolingParams."""
    own = {key: params.pop(key) for key in ("priority", "cache_salt", "deadline", "token_types") if key in params}
    if task is Task.GENERATE:
        params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params}
        return NewRequest(id=name, task=task, token_ids=tokens, sampling=SamplingParams(**params), **own)
    return NewRequest(id=name, task=task, token_ids=tokens, pooling=PoolingParams(**params), **own)


def finish(made: Engine) -> dict[tuple[str, int], Output]:
    """Step until nothing is left; outputs by (request id, sequence)."""
    outputs: dict[tuple[str, int], Output] = {}
    while made.has_work():
        for delta in made.step():
            outputs.setdefault((delta.id, delta.index), Output()).take(delta)
    if made.pool is not None:
        made.pool.check()
        assert made.pool.free == made.pool.size
    return outputs


def run(made: Engine, prompts: list[list[int]], **params: Any) -> list[Output]:
    """Run prompts together; the first sequence of each, in order."""
    for i, tokens in enumerate(prompts):
        made.add(request(str(i), tokens, made.task, **params))
    outputs = finish(made)
    return [outputs[str(i), 0] for i in range(len(prompts))]
