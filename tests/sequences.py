"""Helpers for engine tests: requests and schedulers made of integers alone."""

from __future__ import annotations

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.request import NewRequest, SamplingParams
from anycore.engine.sequence import Request


def limits(seqs: int = 4, tokens: int = 16, length: int = 64, block_size: int = 4, blocks: int = 33) -> Limits:
    return Limits(seqs, tokens, length, block_size, blocks)


def sequence(
    number: int, tokens: list[int], output: int = 4, tenant: str = "", weight: float = 1.0, **params: object
) -> Request:
    """A generate request that wants `output` tokens."""
    sampling = SamplingParams(max_tokens=output, **params)  # type: ignore[arg-type]
    new = NewRequest(
        id=str(number), task=Task.GENERATE, token_ids=tokens, sampling=sampling, tenant=tenant, weight=weight
    )
    return Request(new, 0, number, len(tokens) + output)
