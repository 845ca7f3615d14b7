"""Inputs that end in one vector or one score each: run through the engine together, answered in order."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from anycore.engine.request import Delta, NewRequest, PoolingParams
from anycore.errors import NonFiniteOutput
from anycore.server.door import Call
from anycore.server.generation import settings_of
from anycore.server.merge import merge
from anycore.server.protocol import usage
from anycore.server.protocol_pool import PoolBody, PoolUsage
from anycore.server.sampling import check_priority

if TYPE_CHECKING:
    from anycore.server.state import ServedModel
    from anycore.text.draft import Rendered

log = logging.getLogger(__name__)


async def pooled(
    model: ServedModel,
    rendered: list[Rendered],
    names: list[str],
    params: PoolingParams,
    body: PoolBody,
    caller: Call,
    loud: bool,
) -> list[Delta]:
    """Return the engine's answer to each rendered input; `names` say in errors which field an input came from;
    `loud` writes inputs to the log.

    Raises:
        BadRequest: a priority, where the server knows none.
        NonFiniteOutput: naming the input.
        AnycoreError: as the engine says; what is under way is ended.
    """
    check_priority(body.priority, model.slot.config.scheduling_policy)
    shared = settings_of(
        model.task.value,
        task=model.task,
        priority=body.priority,
        cache_salt=body.cache_salt,
        tenant=caller.account.tenant,
    )
    caller.account.take_prompt(sum(len(each.token_ids) for each in rendered))
    sources = []
    for i, each in enumerate(rendered):
        request = msgspec.structs.replace(
            shared, id=f"{shared.id}-{i}", token_ids=each.token_ids, token_types=each.token_types, pooling=params
        )
        if loud:
            log.info("%s %s: %r", request.id, names[i], each.text or each.token_ids)
        sources.append(_one(model, request, caller, i, names[i]))
    answers: dict[int, Delta] = {}
    async for i, delta in merge(sources, model.window):
        answers[i] = delta
    return [answers[i] for i in range(len(rendered))]


async def _one(
    model: ServedModel, request: NewRequest, caller: Call, index: int, name: str
) -> AsyncIterator[tuple[int, Delta]]:
    try:
        request = caller.in_time(request, model)
        async with model.slot.submit(request) as stream:
            async for delta in stream:
                yield index, delta
    except NonFiniteOutput as error:
        raise NonFiniteOutput(f"{name}: {error.message}", param=name) from None


def vector_of(answer: Delta, name: str) -> NDArray[np.float32]:
    """Read the vector of an answer.

    Raises:
        NonFiniteOutput: it holds NaN or infinity.
    """
    assert answer.vector is not None
    vector: NDArray[np.float32] = np.frombuffer(answer.vector, dtype="<f4")
    if not np.isfinite(vector).all():
        raise NonFiniteOutput(f"{name}: the vector holds NaN or infinity", param=name)
    return vector


def usage_of(rendered: list[Rendered], answers: list[Delta]) -> PoolUsage:
    """Count the tokens that were computed, and the inputs that were cut."""
    counted = usage(sum(len(each.token_ids) for each in rendered), 0, sum(a.cached_tokens for a in answers))
    return {**counted, "truncated": sum(each.truncated for each in rendered)}
