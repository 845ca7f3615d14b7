"""A step on its way: which of its rows are wanted, what was launched, and what came back."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from anycore.contract.backend import Download, StepOutput
from anycore.contract.batch import Sampling
from anycore.engine.alternatives import Asking
from anycore.engine.beams import Branch
from anycore.engine.decodes import Array
from anycore.engine.request import TokenLogprob
from anycore.engine.scheduler import EMPTY, Step
from anycore.engine.sequence import Request

Vector = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class Wanted:
    """The rows of a step whose hidden states are needed, and whose they are. Sampled rows come first."""

    rows: Array
    sampled: list[Request] = field(default_factory=list)  # one row each
    seats: Array = field(default_factory=lambda: EMPTY)  # of those sampled
    prompt: list[tuple[Request, int, int]] = field(default_factory=list)  # prompt scores: request, position, rows
    pooled: list[Request] = field(default_factory=list)
    asking: Asking = field(default_factory=Asking)  # of those sampled
    only_sampled: bool = False  # every request of the step has a token sampled


@dataclass
class Launched:
    """A step under way. `arrive` waits for tensors on the host: `further` ones of `alternatives`, those of the samples,
    and the pooled values. It is there once the step is sampled.
    """

    step: Step
    wanted: Wanted
    output: StepOutput
    pooled: list[Tensor] = field(default_factory=list)
    further: int = 0
    arrive: Download = list
    taken: Future[None] | None = None  # by grammars: what the step was sampled for those rows that keep to one

    def ids(self) -> list[int]:
        """Wait for the sampled ids, on whichever thread."""
        first = self.arrive()[self.further]
        ids: list[int] = (first if first.dim() == 1 else first[0]).tolist()
        return ids


@dataclass(slots=True)
class Unsampled:
    """A step whose sampling is put off: what it will be sampled from, and how."""

    logits: Tensor
    sampling: Sampling
    launched: Launched | None = None  # the step itself, once its launch is through


@dataclass(slots=True)
class Results:
    """What a step brought. Lists of what was sampled are in the order of `sampled`; others name the request."""

    sampled: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)  # None for those that did not ask
    branches: dict[Request, list[Branch]] = field(default_factory=dict)  # of steps of beam searches
    prompt: list[tuple[Request, int, list[TokenLogprob]]] = field(default_factory=list)  # from the row at a position on
    pooled: list[tuple[Request, Vector, bool]] = field(default_factory=list)  # vector or labels' logits, all finite
