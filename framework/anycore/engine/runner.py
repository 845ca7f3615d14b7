"""From a step to a batch, and from what the device leaves to numbers on the host.

`launch` may return before the device is done; `collect` waits for it. A row whose token the host has not seen yet
takes its id from the samples of the step before, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Backend, Limits, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.declare import Task
from anycore.contract.sampling import report
from anycore.engine.pooling import pool
from anycore.engine.request import Request, TokenLogprob
from anycore.engine.sampler import Sampler
from anycore.engine.scheduler import Entry, Step
from anycore.engine.tasks import wanted_rows
from anycore.models.spec import ModelSpec

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


@dataclass
class Launched:
    """A step under way."""

    step: Step
    wanted: Wanted
    output: StepOutput


@dataclass
class Result:
    """What a step brought for one request."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_start: int = 0  # position of the row behind the first of `prompt_scores`
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
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
        self.sampler = Sampler(model.spec.vocab_size, backend.device)
        self._rows = wanted_rows(model.spec, task)
        self._step = backend.optimize(self._run, limits)
        self._last: Launched | None = None

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Build the batch and hand it to the device."""
        wanted = self._wanted(step)
        batch = self._batch(step, wanted.rows)
        batch.plan = self.backend.ops.plan(batch)
        sampling = self.sampler.prepare(wanted.sampled) if wanted.sampled else None
        output = self._step(batch, sampling)
        if output.samples is not None:
            self.sampler.observe(wanted.sampled, output.samples)
        self._last = Launched(step, wanted, output)
        return self._last

    @torch.inference_mode()
    def collect(self, launched: Launched) -> dict[int, Result]:
        """Wait for a step and return its results by `id(request)`."""
        results = {id(entry.request): Result() for entry in launched.step.entries}
        if launched.output.samples is not None:
            self._collect_samples(launched.wanted.sampled, launched.output.samples, results)
        if launched.wanted.prompt:
            self._collect_prompt(launched, results)
        if launched.wanted.pooled:
            self._collect_pooled(launched, results)
        return results

    def _run(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        """The step function that a backend may optimise. The first rows of `output_rows` are the sampled ones."""
        rows = self.model.forward(batch).index_select(0, batch.output_rows)
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

    def _batch(self, step: Step, output_rows: list[int]) -> Batch:
        entries = step.entries
        ids: list[int] = []
        pending: list[tuple[int, int]] = []  # row, place in the last samples
        for entry in entries:
            tokens = entry.request.tokens[entry.start : entry.start + entry.rows]
            if len(tokens) < entry.rows:
                pending.append((len(ids) + len(tokens), self._place(entry.request)))
                tokens = [*tokens, 0]
            ids += tokens
        lens = np.array([entry.rows for entry in entries], dtype=np.int64)
        starts = np.array([entry.start for entry in entries], dtype=np.int64)
        offsets = np.repeat(starts - (np.cumsum(lens) - lens), lens)
        positions = np.arange(lens.sum(), dtype=np.int64) + offsets
        batch = Batch(
            input_ids=self._upload(np.array(ids, dtype=np.int64)),
            positions=self._upload(positions),
            query_lens=lens.tolist(),
            context_lens=starts.tolist(),
            output_rows=self._upload(np.array(output_rows, dtype=np.int64)),
            causal=self.model.spec.attention == "causal",
        )
        if pending and self._last is not None and self._last.output.samples is not None:
            rows, places = zip(*pending, strict=True)
            sources = self._last.output.samples.ids[self._upload(np.array(places, dtype=np.int64))]
            batch.input_ids.index_copy_(0, self._upload(np.array(rows, dtype=np.int64)), sources)
        if self.model.spec.token_type_count:
            types = [t for entry in entries for t in entry.request.new.token_types or [0] * entry.rows]
            batch.token_types = self._upload(np.array(types, dtype=np.int64))
        if self.kv is not None:
            self._address(batch, entries, positions, lens)
        return batch

    def _address(
        self,
        batch: Batch,
        entries: list[Entry],
        positions: np.ndarray[Any, np.dtype[np.int64]],
        lens: np.ndarray[Any, np.dtype[np.int64]],
    ) -> None:
        """Fill in block tables and slots."""
        size = self.limits.block_size
        used = [-(-(entry.start + entry.rows) // size) for entry in entries]
        tables = np.zeros((len(entries), max(used)), dtype=np.int32)
        for i, (entry, count) in enumerate(zip(entries, used, strict=True)):
            tables[i, :count] = entry.request.blocks[:count]
        owner = np.repeat(np.arange(len(entries)), lens)
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        batch.block_tables = self._upload(tables)
        batch.slots = self._upload(slots)
        batch.kv = self.kv
        batch.block_size = size

    def _place(self, request: Request) -> int:
        """Row of a request in the samples of the step before."""
        assert self._last is not None
        return next(i for i, other in enumerate(self._last.wanted.sampled) if other is request)

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return self.backend.memory.upload(torch.from_numpy(array))

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

    def _collect_pooled(self, launched: Launched, results: dict[int, Result]) -> None:
        counts = [count for _, count in launched.wanted.pooled]
        rows = launched.output.rows
        score = self.model.spec.score
        if self.task is Task.RERANK and score is not None and score.kind != "cosine":
            values = self.model.score(rows)
        else:
            kind = self.model.spec.pooling.kind if self.model.spec.pooling else "last"
            values = self.model.project(pool(rows, counts, kind))
        host = values.float().cpu().numpy()
        for (request, _), vector in zip(launched.wanted.pooled, host, strict=True):
            results[id(request)].vector = vector
            results[id(request)].finite = bool(np.isfinite(vector).all())


def _tops(ids: Tensor | None, logprobs: Tensor | None, rows: int) -> list[list[tuple[int, float]]]:
    """The most likely (id, logprob) of each row."""
    if ids is None or logprobs is None:
        return [[] for _ in range(rows)]
    return [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=False)]
