"""Log-probabilities that few rows ask for: of ids that a request names, and what a beam search chooses from.

Computed on those rows alone, from their hidden states beside the step's own sampling, which no backend has to know of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anycore.contract.batch import Sampling
from anycore.contract.costs import SAMPLED_ROWS
from anycore.contract.ops import Ops
from anycore.contract.sampling import adjust
from anycore.engine.beams import Branch
from anycore.engine.request import TokenLogprob
from anycore.engine.sampler import Sampler
from anycore.engine.sequence import Request


@dataclass(slots=True)
class Asking:
    """Those of a step's sampled rows that ask for more than `Samples` holds."""

    naming: list[int] = field(default_factory=list)  # logprob_token_ids
    branching: list[int] = field(default_factory=list)  # one step of a beam search each

    def __bool__(self) -> bool:
        return bool(self.naming or self.branching)


def asking(requests: list[Request]) -> Asking:
    """Find them among the requests of sampled rows."""
    found = Asking()
    for row, request in enumerate(requests):
        if request.search is not None:
            found.branching.append(row)
        elif request.sampling.logprob_token_ids:
            found.naming.append(row)
    return found


def compute(
    logits: Callable[[Tensor], Tensor],
    ops: Ops,
    sampler: Sampler,
    requests: list[Request],
    hidden: Tensor,
    rows: Asking,
) -> list[Tensor]:
    """Return what `named` and `branched` read, on the device. `hidden` [R, H] are the states of the sampled rows."""
    leaving: list[Tensor] = []
    for part in _parts(rows.naming):
        raw = logits(hidden[part])
        lists = [requests[row].sampling.logprob_token_ids for row in part]
        width = max(map(len, lists))
        ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in lists], device=raw.device)
        leaving.append(ops.logprobs(raw, ids))
    for part in _parts(rows.branching):
        wanted = [requests[row] for row in part]
        leaving += likeliest(logits(hidden[part]), sampler.edits(wanted), max(map(_branches, wanted)))
    return leaving


def likeliest(raw: Tensor, edits: Sampling, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, V] → ids, adjusted and raw log-probabilities [R, count], by the adjusted ones.

    As in transformers' beam search, penalties, biases and bans change log-probabilities, which stay as they are then.
    """
    logprobs = raw.log_softmax(-1)
    adjusted = logprobs.clone() if edits.edited else logprobs
    adjust(adjusted, edits)
    top = adjusted.topk(min(count, adjusted.shape[-1]))
    return top.indices, top.values, logprobs.gather(1, top.indices)


def named(arrived: Iterator[Tensor], requests: list[Request], rows: Asking) -> dict[int, list[tuple[int, float]]]:
    """The ids that rows have named, with their log-probabilities. Takes its tensors from what has arrived."""
    found: dict[int, list[tuple[int, float]]] = {}
    for part in _parts(rows.naming):
        for row, values in zip(part, next(arrived).tolist(), strict=True):
            found[row] = list(zip(requests[row].sampling.logprob_token_ids, values, strict=False))
    return found


def branched(
    arrived: Iterator[Tensor], requests: list[Request], rows: Asking, logprobs: list[TokenLogprob | None]
) -> dict[Request, list[Branch]]:
    """The branches of the requests that make a step of a beam search. `logprobs` has a place for every row."""
    found: dict[Request, list[Branch]] = {}
    for part in _parts(rows.branching):
        ids, adjusted, raw = (next(arrived).tolist() for _ in range(3))
        for row, *of_row in zip(part, ids, adjusted, raw, strict=True):
            known = logprobs[row]
            top = known.top if known is not None else []
            branches = [Branch(token, score, logprob, top) for token, score, logprob in zip(*of_row, strict=True)]
            found[requests[row]] = branches[: _branches(requests[row])]
    return found


def _parts(rows: list[int]) -> Iterator[list[int]]:
    """As many at a time as the memory plan has temporaries for."""
    return (rows[start : start + SAMPLED_ROWS] for start in range(0, len(rows), SAMPLED_ROWS))


def _branches(request: Request) -> int:
    assert request.search is not None
    return request.search.branches
