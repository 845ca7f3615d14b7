"""From a step to a batch, and from what the device leaves to numbers on the host.

`launch` may return before the device is done; `collect` waits for it. A row whose token the host has not seen yet
takes its id from the samples of the step before, on the device. Where rows keep to a grammar, their masks take as long
as the forward pass: then sampling may be put off until the next step is laid out on the host.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Backend, Limits, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.declare import Task
from anycore.contract.desk import Desk
from anycore.engine import alternatives
from anycore.engine.alternatives import asking
from anycore.engine.building import BatchBuilder, extended
from anycore.engine.launched import Launched, Results, Unsampled, Wanted
from anycore.engine.request import TokenLogprob
from anycore.engine.sampler import Sampler
from anycore.engine.scheduler import EMPTY, Entry, Step
from anycore.engine.sequence import Request
from anycore.engine.tasks import wanted_rows
from anycore.models.spec import ModelSpec

LOGIT_ROWS = 64
"""Prompt log-probabilities are taken this many rows at a time, so that [rows, V] tables stay small."""
NOT_YET = Samples(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
"""Of a step whose sampling is put off."""


class Model(Protocol):
    """What the runner asks of a model (models/decoder.py, models/encoder.py)."""

    spec: ModelSpec

    def forward(self, batch: Batch) -> Tensor: ...
    def logits(self, rows: Tensor) -> Tensor: ...
    def score(self, rows: Tensor) -> Tensor: ...
    def project(self, vectors: Tensor) -> Tensor: ...


class Runner:
    """Owns the model and the KV cache of one engine. `kv` is None for models without one."""

    def __init__(self, model: Model, backend: Backend, task: Task, limits: Limits, kv: list[Any] | None) -> None:
        self.model = model
        self.backend = backend
        self.task = task
        self.limits = limits
        self.kv = kv
        self._rows = wanted_rows(model.spec, task)
        self._step = backend.optimize(WholeStep(model.forward, self._sample), limits)
        desk: Desk | None = getattr(self._step, "desk", None)
        self.sampler = Sampler(
            model.spec.vocab_size, backend.device, backend.memory, backend.ops.draw_dtype, limits.max_num_seqs, desk
        )
        self.builder = BatchBuilder(model.spec, backend.memory, limits, kv, desk)
        self._before: Wanted | None = None  # of the step before
        self._ahead = False  # sampling may be put off
        self._unsampled: Unsampled | None = None  # the step that waits for it
        self.padding = 0  # rows that steps computed for nothing

    @torch.inference_mode()
    def launch(self, step: Step, ahead: bool = False) -> Launched:
        """Build the batch and hand it to the device.

        With `ahead`, a step whose sampling needs masks is not sampled before the next one is laid out or it is
        collected: until then the host has other things to do, and the device the forward pass.
        """
        before = self._before
        goes_on = before is not None and before.only_sampled and not step.chunks and before.sampled == step.decodes
        if goes_on and before is not None:
            wanted, send = before, self.builder.next_tokens(before.sampled)
        else:
            wanted = self._wanted(step)
            send = self.builder.build(step, wanted.rows)
        self._sample_last()
        for chunk in step.chunks:  # with one a request comes to its seat; some have no other kind of row
            if not chunk.request.is_pooled:
                self.sampler.seat(chunk.request, chunk.request.num_output + (not chunk.last))
        sampling = self._sampling(wanted)
        batch = send()
        batch.plan = self.backend.ops.plan(batch)
        self._ahead = ahead
        if sampling is not None and not ahead:
            self.sampler.start_masks()
        launched = Launched(step, wanted, self._step(batch, sampling))
        if sampling is not None and ahead:  # only then: the device waits for its step, the masks for the tokens before
            self.sampler.start_masks()
        self.padding += batch.padding
        if wanted.pooled:
            launched.pooled = [self._pooled(launched.output.rows, batch)]
        batch.plan = None  # a plan knows its batch: the circle would keep masks and workspaces until it is looked for
        self._before = wanted
        self.builder.expect(wanted.seats)
        if self._unsampled is not None:
            self._unsampled.launched = launched
        else:
            self._send_off(launched)
        return launched

    @torch.inference_mode()
    def use_pause(self) -> bool:
        """Let the device's step function do what a later step would have to wait for; return whether it did."""
        use = getattr(self._step, "use_pause", None)
        return use is not None and bool(use())

    def _sample_last(self) -> None:
        """Sample the step that was launched last, if that was put off."""
        last, self._unsampled = self._unsampled, None
        if last is None or last.launched is None:  # the latter only where the launch failed
            return
        self.sampler.settle()
        last.launched.output.samples = self.backend.ops.sample(last.logits, last.sampling)
        self._send_off(last.launched)

    def _send_off(self, launched: Launched) -> None:
        """Begin to bring to the host what a step leaves, which is sampled, and remember it for the next one."""
        output, wanted = launched.output, launched.wanted
        leaving: list[Tensor] = []
        if wanted.asking:  # before what is sampled is counted
            leaving = alternatives.compute(
                self.model.logits, self.backend.ops, self.sampler, wanted.sampled, output.rows, wanted.asking
            )
        launched.further = len(leaving)
        if output.samples is not None:
            self.sampler.observe(wanted.sampled, output.samples)
            together = output.samples.together
            leaving += _tensors(output.samples) if together is None else [together]
        self.builder.remember(output.samples)
        launched.arrive = self.backend.memory.download(leaving + launched.pooled)
        if wanted.sampled:
            launched.taken = self.sampler.take(launched.ids)

    @torch.inference_mode()
    def collect(self, launched: Launched) -> Results:
        """Wait for a step and return its results. Grammars have taken its tokens then."""
        if self._unsampled is not None and launched is self._unsampled.launched:
            self._sample_last()
        arrived, wanted = launched.arrive(), launched.wanted
        if launched.taken is not None:
            launched.taken.result()
        further, arrived = iter(arrived[: launched.further]), arrived[launched.further :]
        results = Results()
        pooled = arrived.pop().numpy() if wanted.pooled else None
        if wanted.sampled:
            if launched.output.samples is not None and launched.output.samples.together is not None:
                arrived = list(arrived[0][:, : len(wanted.sampled)])
            samples = Samples(*arrived)
            results.sampled = wanted.sampled
            results.tokens, results.finite = samples.ids.tolist(), samples.finite.tolist()
            named = alternatives.named(further, wanted.sampled, wanted.asking)
            results.logprobs = _logprobs(wanted.sampled, samples, named)
            results.branches = alternatives.branched(further, wanted.sampled, wanted.asking, results.logprobs)
        if wanted.prompt:
            results.prompt = self._prompt_scores(launched)
        if pooled is not None:
            finite = np.isfinite(pooled).all(axis=1).tolist()
            results.pooled = list(zip(wanted.pooled, pooled, finite, strict=True))
        return results

    def _sample(self, rows: Tensor, sampling: Sampling) -> Samples:
        logits = self.model.logits(rows)
        if sampling.masked is not None:
            if self._ahead:
                self._unsampled = Unsampled(logits, sampling)
                return NOT_YET
            self.sampler.settle()
        return self.backend.ops.sample(logits, sampling)

    # --- building -----------------------------------------------------------------------------------------------

    def _wanted(self, step: Step) -> Wanted:
        """Which rows' hidden states are needed, and for what."""
        if self._rows == "all":  # pooled over whole requests, none of which is split
            return Wanted(np.arange(step.rows), pooled=[entry.request for entry in step.chunks])
        first = at = len(step.decodes)
        wanted = Wanted(EMPTY, sampled=list(step.decodes))
        ends: list[int] = []
        further: list[int] = []
        for entry in step.chunks:
            request, end = entry.request, at + entry.rows
            if request.is_pooled:
                if entry.last:
                    further.append(at if self._rows == "first" else end - 1)
                    wanted.pooled.append(request)
            else:
                if entry.last:
                    wanted.sampled.append(request)
                    ends.append(end - 1)
                scored = self._scored_rows(entry)
                if scored:
                    further += range(at, at + scored)
                    wanted.prompt.append((request, entry.start, scored))
            at = end
        wanted.rows = extended(np.arange(first), ends + further)
        wanted.seats = extended(step.seats, [request.seat for request in wanted.sampled[first:]])
        wanted.only_sampled = len(wanted.rows) == len(wanted.sampled) == len(step.decodes) + len(step.chunks)
        return wanted

    def _sampling(self, wanted: Wanted) -> Sampling | None:
        if not wanted.sampled:
            return None
        sampling = self.sampler.prepare(wanted.sampled, wanted.seats)
        if wanted is not self._before and not self.sampler.is_plain:
            wanted.asking = asking(wanted.sampled)
        return sampling

    def _scored_rows(self, entry: Entry) -> int:
        """Rows of an entry whose next prompt token's log-probability is still wanted (row t scores token t + 1)."""
        request = entry.request
        if request.sampling.prompt_logprobs is None or request.index != 0:
            return 0
        if len(request.tokens) > request.num_prompt:
            return 0  # recomputed after preemption: reported before
        return max(0, min(entry.rows, request.num_prompt - 1 - entry.start))

    # --- collecting ---------------------------------------------------------------------------------------------

    def _prompt_scores(self, launched: Launched) -> list[tuple[Request, int, list[TokenLogprob]]]:
        found = []
        at = len(launched.wanted.sampled)
        for request, start, count in launched.wanted.prompt:
            asked = request.sampling.prompt_logprobs
            assert asked is not None
            targets = request.tokens[start + 1 : start + 1 + count].tolist()
            hidden = launched.output.rows[at : at + count]
            found.append((request, start, self._score_prompt(hidden, targets, asked)))
            at += count
        return found

    def _score_prompt(self, hidden: Tensor, targets: list[int], alternatives: int) -> list[TokenLogprob]:
        """Log-probability of each target token given the hidden row before it."""
        out: list[TokenLogprob] = []
        for start in range(0, len(targets), LOGIT_ROWS):
            part = targets[start : start + LOGIT_ROWS]
            raw = self.model.logits(hidden[start : start + LOGIT_ROWS])
            ids = torch.tensor(part, dtype=torch.int64, device=raw.device)
            logprobs, ranks, top_ids, top_logprobs = self.backend.ops.report(raw, ids, alternatives)
            tops = _tops(top_ids, top_logprobs, len(part))
            out += map(TokenLogprob, part, logprobs.tolist(), ranks.tolist(), tops)
        return out

    def _pooled(self, rows: Tensor, batch: Batch) -> Tensor:
        """[B, D] float32: vectors, or the labels' logits, still on the device."""
        score = self.model.spec.score
        if self.task is Task.RERANK and score is not None and score.kind != "cosine":
            return self.model.score(rows).float()
        kind = self.model.spec.pooling.kind if self.model.spec.pooling else "last"
        pooled = self.backend.ops.pool(rows, batch, kind) if self._rows == "all" else rows.float()
        return self.model.project(pooled).float()


def _tensors(samples: Samples) -> list[Tensor]:
    """The tensors that are there, in the order of the fields: later ones are there only if earlier ones are."""
    found = (getattr(samples, field.name) for field in fields(samples) if field.name != "together")
    return [tensor for tensor in found if tensor is not None]


def _logprobs(
    requests: list[Request], samples: Samples, named: dict[int, list[tuple[int, float]]]
) -> list[TokenLogprob | None]:
    """One a request; None for those that did not ask. `named` has what rows asked for instead of the most likely."""
    if samples.logprobs is None or samples.ranks is None:
        return [None] * len(requests)
    tops = _tops(samples.top_ids, samples.top_logprobs, len(requests))
    rows = zip(requests, samples.ids.tolist(), samples.logprobs.tolist(), samples.ranks.tolist(), tops, strict=True)
    found: list[TokenLogprob | None] = []
    for request, token, logprob, rank, top in rows:
        asked = request.sampling.logprobs
        found.append(None if asked is None else TokenLogprob(token, logprob, rank, top[:asked]))
    for row, pairs in named.items():
        own = found[row]
        assert own is not None
        others = [pair for pair in pairs if pair[0] != own.token_id]
        found[row] = TokenLogprob(own.token_id, own.logprob, own.rank, [(own.token_id, own.logprob), *others])
    return found


def _tops(ids: Tensor | None, logprobs: Tensor | None, rows: int) -> list[list[tuple[int, float]]]:
    """The most likely (id, logprob) of each row."""
    if ids is None or logprobs is None:
        return [[] for _ in range(rows)]
    return [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=False)]
