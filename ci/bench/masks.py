"""Processor time of an engine's step under a grammar: its own thread and those of the masks, before a device that
answers at once.

    python ci/bench/masks.py MODEL [--schema plain|bounded|nested] [--rows 64] [--steps 1300]

MODEL lends its tokens only; every row writes the same valid document. Its places come again, and the least of each
counts; shown are the means of these, in ms a step, without a grammar and with one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from statistics import fmean
from typing import Any

import host
import torch
from constrained import SCHEMAS, endless
from host import LENGTH, Instant, Stub, Traffic

from anycore.contract.backend import StepFn, WholeStep
from anycore.contract.batch import Samples, Sampling
from anycore.contract.declare import Task
from anycore.contract.graphs import GraphStep
from anycore.contract.sizes import Limits
from anycore.engine.grammar import Grammars
from anycore.engine.request import NewRequest, SamplingParams
from anycore.models.source import locate
from anycore.models.spec import read_spec
from anycore.text import grammar

PROMPT = 64


class Sampled(Instant):
    """Like the other, except that sampling is the engine's, up to the choice of ids."""

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        own = WholeStep(lambda batch: self._rows, step.sample)
        return GraphStep(own, self.ops, limits, self.device, self._capture, compiles=False, memory=self.memory)


class Writing(Traffic):
    """Requests that write a text, those with a `form` under this grammar."""

    def __init__(self, rows: int, text: torch.Tensor, tokens: Any, form: str | None) -> None:
        self.text, self.tokens, self.form = text, tokens, form
        super().__init__(rows, 0.8, mixed=False)

    def _add(self) -> None:
        self.engine.grammars = self.engine.grammars or Grammars(lambda: self.tokens)
        vars(self.engine.runner.backend.ops)["sample"] = self._sample
        self._count += 1
        sampling = SamplingParams(max_tokens=LENGTH - PROMPT, temperature=0.8, ignore_eos=True, grammar=self.form)
        prompt = [100 + (self._count * i) % 1000 for i in range(PROMPT)]
        self.engine.add(NewRequest(id=str(self._count), task=Task.GENERATE, token_ids=prompt, sampling=sampling))

    def _sample(self, logits: torch.Tensor, params: Sampling) -> Samples:
        sampler, count = self.engine.runner.sampler, len(params.temperature)
        places = torch.arange(count)  # of what is only captured
        if params.masked is not None and sampler._group is not None:
            places = torch.from_numpy(sampler._places[sampler._group.seats].astype("int64") - 2)
        return Samples(self.text[places], torch.ones(count, dtype=torch.bool))


def measure(traffic: Writing, steps: int, period: int) -> str:
    running = traffic.engine.scheduler.running
    while len(running) < traffic.running:
        traffic.engine.step()
    for _ in range(period):
        traffic.engine.step()
    gc.collect()
    own, others = [], []
    for _ in range(steps):
        thread, process = time.thread_time(), time.process_time()
        deltas = traffic.engine.step()
        own.append(time.thread_time() - thread)
        others.append(time.process_time() - process - own[-1])
        assert not any(delta.error for delta in deltas), deltas
    least = [fmean(min(times[i::period]) for i in range(period)) for times in (own, others)]
    return "engine's thread {:.3f}, others {:.3f} ms a step".format(*(1000 * seconds for seconds in least))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--schema", choices=SCHEMAS, default="plain")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    host.Instant = Sampled  # type: ignore[misc]
    source = locate(options.model)
    spec = read_spec(source)
    Stub.spec = replace(Stub.spec, vocab_size=spec.vocab_size, eos_ids=spec.eos_ids)
    Stub.logits = lambda self, rows: rows  # type: ignore[assignment, return-value]
    tokens = grammar.vocabulary_of(source, spec)
    item, example = SCHEMAS[options.schema]
    text, shorter = (tokens.tokenize_str(json.dumps([example] * count)) for count in (200, 199))
    for form in (None, grammar.json_schema(endless(item))):
        traffic = Writing(options.rows, torch.tensor(text), tokens, form)
        print("held:" if form else "free:", measure(traffic, options.steps, len(text) - len(shorter)), flush=True)


if __name__ == "__main__":
    main()
