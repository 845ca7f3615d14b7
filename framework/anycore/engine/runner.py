"""From a step to a batch, and from what the device leaves to numbers on the host.

`launch` may return before the device is done; `collect` waits for it. A row whose token the host has not seen yet
takes its id from the samples of the step before, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Backend, Download, Limits, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.declare import Task
from anycore.contract.sampling import report
from anycore.engine.building import BatchBuilder
from anycore.engine.pooling import pool
from anycore.engine.request import Request, TokenLogprob
from anycore.engine.sampler import Sampler
from anycore.engine.scheduler import Entry, Step
from anycore.engine.tasks import wanted_rows
from anycore.models.spec import ModelSpec

PLAIN_SAMPLES = 2
"""Tensors of samples without log-probabilities: ids and whether they are finite."""

LOGIT_ROWS = 64
"""Prompt log-probabilities are taken this many rows at a time, so that [rows, V] tables stay small."""


class Model(Protocol):
    """What the runner asks of a model (models/decoder.py, models/encoder.py)."""

    spec: ModelSpec

    def forward(self, batch: Batch) -> Tensor: ...
    def logits(self, rows: Tensor) -> Tensor: ...
    def score(self, rows: Tensor) -> Tensor: ...
    def project(self, vectors: Tensor) -> Tensor: ...


@dataclass
class Wanted:
    """The rows of a step whose hidden states are needed, and whose they are. Sampled rows come first."""

    rows: list[int] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)  # one row each
    prompt: list[tuple[Request, int, int]] = field(default_factory=list)  # prompt scores: request, position, rows
    pooled: list[tuple[Request, int]] = field(default_factory=list)  # pooled requests and their number of rows
    only_sampled: bool = False  # every request of the step has a token sampled


@dataclass
class Launched:
    """A step under way. `arrive` waits for its samples' tensors, then the pooled values, on the host."""

    step: Step
    wanted: Wanted
    output: StepOutput
    arrive: Download


@dataclass(slots=True)
class Result:
    """What a step brought for one request."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_start: int = 0  # position of the row behind the first of `prompt_scores`
    prompt_scores: Sequence[TokenLogprob] = ()
    vector: np.ndarray[Any, np.dtype[np.float32]] | None = None  # pooled, or the labels' logits
    finite: bool = True


class Runner:
    """Owns the model and the KV cache of one engine. `kv` is None for models without one."""

    def __init__(self, model: Model, backend: Backend, task: Task, limits: Limits, kv: list[Any] | None) -> None:
        self.model = model
        self.backend = backend
        self.task = task
        self.limits = limits
        self.kv = kv
        self.sampler = Sampler(model.spec.vocab_size, backend.device, backend.memory)
        self.builder = BatchBuilder(model.spec, backend.memory, limits, kv)
        self._rows = wanted_rows(model.spec, task)
        self._step = backend.optimize(self._run, limits)
        self._before: Wanted | None = None  # of the step before

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Build the batch and hand it to the device."""
        before = self._before
        if before is not None and before.only_sampled and before.sampled == [entry.request for entry in step.entries]:
            wanted = before  # each goes on with the token just sampled
            batch = self.builder.next_tokens(wanted.sampled)
        else:
            wanted = self._wanted(step)
            batch = self.builder.build(step.entries, wanted.rows)
        batch.plan = self.backend.ops.plan(batch)
        sampling = self.sampler.prepare(wanted.sampled) if wanted.sampled else None
        output = self._step(batch, sampling)
        leaving: list[Tensor] = []
        if output.samples is not None:
            self.sampler.observe(wanted.sampled, output.samples)
            leaving += _tensors(output.samples)
        if wanted.pooled:
            leaving.append(self._pooled(output.rows, wanted.pooled))
        self._before = wanted
        self.builder.remember(wanted.sampled, output.samples)
        return Launched(step, wanted, output, self.backend.memory.download(leaving))

    @torch.inference_mode()
    def collect(self, launched: Launched) -> dict[int, Result]:
        """Wait for a step and return its results by `id(request)`."""
        arrived = launched.arrive()
        if launched.wanted.only_sampled and len(arrived) == PLAIN_SAMPLES:
            ids, finite = arrived[0].tolist(), arrived[1].tolist()
            sampled = zip(launched.wanted.sampled, ids, finite, strict=True)
            return {id(request): Result(token, finite=fine) for request, token, fine in sampled}
        results = {id(entry.request): Result() for entry in launched.step.entries}
        if launched.output.samples is not None:
            self._collect_samples(
                launched.wanted.sampled, Samples(*arrived[: len(arrived) - bool(launched.wanted.pooled)]), results
            )
        if launched.wanted.prompt:
            self._collect_prompt(launched, results)
        if launched.wanted.pooled:
            vectors = arrived[-1].numpy()
            finite = np.isfinite(vectors).all(axis=1).tolist()
            for (request, _), vector, fine in zip(launched.wanted.pooled, vectors, finite, strict=True):
                results[id(request)].vector = vector
                results[id(request)].finite = fine
        return results

    def _run(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        """The step function that a backend may optimise. The first rows of `output_rows` are the sampled ones."""
        rows = self.model.forward(batch)
        if sampling is None:
            return StepOutput(rows)
        logits = self.model.logits(rows[: len(sampling.temperature)])
        return StepOutput(rows, self.backend.ops.sample(logits, sampling))

    # --- building -----------------------------------------------------------------------------------------------

    def _wanted(self, step: Step) -> Wanted:
        """Which rows' hidden states are needed, and for what."""
        wanted = Wanted()
        further: list[int] = []
        at = 0
        for entry in step.entries:
            request, end = entry.request, at + entry.rows
            if request.is_pooled:
                if entry.last:
                    rows = {"first": [at], "last": [end - 1], "all": list(range(at, end))}[self._rows]
                    further += rows
                    wanted.pooled.append((request, len(rows)))
            else:
                if entry.last:
                    wanted.sampled.append(request)
                    wanted.rows.append(end - 1)
                scored = self._scored_rows(entry)
                if scored:
                    further += range(at, at + scored)
                    wanted.prompt.append((request, entry.start, scored))
            at = end
        wanted.rows += further
        wanted.only_sampled = len(wanted.rows) == len(wanted.sampled) == len(step.entries)
        return wanted

    def _scored_rows(self, entry: Entry) -> int:
        """Rows of an entry whose next prompt token's log-probability is still wanted (row t scores token t + 1)."""
        request = entry.request
        params = request.new.sampling
        if params is None or params.prompt_logprobs is None or request.index != 0:
            return 0
        if len(request.tokens) > request.num_prompt:
            return 0  # recomputed after preemption: reported before
        return max(0, min(entry.rows, request.num_prompt - 1 - entry.start))

    # --- collecting ---------------------------------------------------------------------------------------------

    def _collect_samples(self, requests: list[Request], samples: Samples, results: dict[int, Result]) -> None:
        ids, finite = samples.ids.tolist(), samples.finite.tolist()
        for request, token, fine in zip(requests, ids, finite, strict=True):
            results[id(request)].token = token
            results[id(request)].finite = fine
        if samples.logprobs is None or samples.ranks is None:
            return
        tops = _tops(samples.top_ids, samples.top_logprobs, len(requests))
        rows = zip(requests, ids, samples.logprobs.tolist(), samples.ranks.tolist(), tops, strict=True)
        for request, token, logprob, rank, top in rows:
            params = request.new.sampling
            if params is not None and params.logprobs is not None:
                results[id(request)].logprob = TokenLogprob(token, logprob, rank, top[: params.logprobs])

    def _collect_prompt(self, launched: Launched, results: dict[int, Result]) -> None:
        at = len(launched.wanted.sampled)
        for request, start, count in launched.wanted.prompt:
            assert request.new.sampling is not None
            assert request.new.sampling.prompt_logprobs is not None
            targets = request.tokens[start + 1 : start + 1 + count]
            hidden = launched.output.rows[at : at + count]
            scores = self._score_prompt(hidden, targets, request.new.sampling.prompt_logprobs)
            results[id(request)].prompt_start = start
            results[id(request)].prompt_scores = scores
            at += count

    def _score_prompt(self, hidden: Tensor, targets: list[int], alternatives: int) -> list[TokenLogprob]:
        """Log-probability of each target token given the hidden row before it."""
        out: list[TokenLogprob] = []
        for start in range(0, len(targets), LOGIT_ROWS):
            part = targets[start : start + LOGIT_ROWS]
            raw = torch.log_softmax(self.model.logits(hidden[start : start + LOGIT_ROWS]), dim=-1)
            ids = torch.tensor(part, dtype=torch.int64, device=raw.device)
            logprobs, ranks, top_ids, top_logprobs = report(raw, ids, alternatives)
            tops = _tops(top_ids, top_logprobs, len(part))
            out += map(TokenLogprob, part, logprobs.tolist(), ranks.tolist(), tops)
        return out

    def _pooled(self, rows: Tensor, pooled: list[tuple[Request, int]]) -> Tensor:
        """[B, D] float32: vectors, or the labels' logits, still on the device."""
        score = self.model.spec.score
        if self.task is Task.RERANK and score is not None and score.kind != "cosine":
            return self.model.score(rows).float()
        kind = self.model.spec.pooling.kind if self.model.spec.pooling else "last"
        return self.model.project(pool(rows, [count for _, count in pooled], kind)).float()


def _tensors(samples: Samples) -> list[Tensor]:
    """The tensors that are there, in the order of the fields: later ones are there only if earlier ones are."""
    found = (getattr(samples, field.name) for field in fields(samples))
    return [tensor for tensor in found if tensor is not None]


def _tops(ids: Tensor | None, logprobs: Tensor | None, rows: int) -> list[list[tuple[int, float]]]:
    """The most likely (id, logprob) of each row."""
    if ids is None or logprobs is None:
        return [[] for _ in range(rows)]
    return [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=False)]
