"""Streams of deltas: what arrives faster than it is taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from anycore.contract.declare import Task
from anycore.engine.request import Delta, FinishReason, NewRequest, SamplingParams, TokenLogprob
from anycore.server.stream import Stream


def stream(n: int = 1) -> Stream:
    observer = SimpleNamespace(token_after=lambda seconds: None, finished=lambda record, request: None)
    owner: Any = SimpleNamespace(name="m", observer=observer, abort=lambda *which: None, forget=lambda stream: None)
    return Stream(owner, NewRequest(id="r", task=Task.GENERATE, token_ids=[1], sampling=SamplingParams(n=n)))


def said(index: int, token: int, **more: Any) -> Delta:
    return Delta(id="r", index=index, token_ids=[token], logprobs=[TokenLogprob(token, -1.0, 1)], **more)


async def rest(made: Stream) -> list[Delta]:
    return [delta async for delta in made]


def test_what_piles_up_becomes_one_delta_a_sequence_and_loses_nothing() -> None:
    made = stream(n=2)
    for delta in (
        said(0, 10, cached_tokens=4, queue_seconds=0.5, prompt_logprobs=[None]),
        said(1, 20),
        said(0, 11),
        said(1, 21, finish=FinishReason.STOP, stop_reason=21),
        said(0, 12),
    ):
        made.take(delta)
    taken = [asyncio.run(anext(made)) for _ in range(2)]
    assert [(d.index, d.token_ids, [p.token_id for p in d.logprobs or ()]) for d in taken] == [
        (0, [10, 11, 12], [10, 11, 12]),
        (1, [20, 21], [20, 21]),
    ]
    assert (taken[0].cached_tokens, taken[0].queue_seconds, taken[0].prompt_logprobs) == (4, 0.5, [None])
    assert (taken[0].finish, taken[1].finish, taken[1].stop_reason) == (None, FinishReason.STOP, 21)
    made.take(said(0, 13, finish=FinishReason.LENGTH))
    assert [d.token_ids for d in asyncio.run(rest(made))] == [[13]]


def test_a_front_that_keeps_up_passes_every_delta_on_as_it_came() -> None:
    made = stream()
    seen = []
    for token in range(3):
        made.take(said(0, token))
        seen.append(asyncio.run(anext(made)).token_ids)
    assert seen == [[0], [1], [2]]


def test_a_stopped_sequence_says_nothing_more() -> None:
    made = stream(n=2)
    made.take(said(0, 10))
    made.take(said(1, 20))
    made.stop(0)
    made.take(said(0, 11))
    made.take(said(1, 21, finish=FinishReason.LENGTH))
    assert [(d.index, d.token_ids) for d in asyncio.run(rest(made))] == [(1, [20, 21])]
