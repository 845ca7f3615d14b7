"""An engine that says its prompt: output is forced by what is asked, ends by EOS, and can be told to misbehave.

`cache_salt` carries the orders: "tokens=3" gives three tokens a step; "logprob=-inf" gives that log-probability to
each of them; "error=CODE" fails after the first step, "stuck" never ends, "silent" never begins, "wide" gives vectors
that overflow.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from typing import Any

from anycore.contract.declare import Task
from anycore.engine.request import Delta, FinishReason, NewRequest, SamplingParams, TokenLogprob
from anycore.engine.stats import Stats
from anycore.server import child, wire


class EchoEngine:
    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._stats = Stats(blocks=100, blocks_free=100)
        self._running: dict[str, tuple[NewRequest, int]] = {}  # with the number of tokens said so far

    def add(self, new: NewRequest) -> None:
        self._running[new.id] = (new, 0)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._stats.aborted += self._running.pop(request_id, None) is not None

    def drain(self) -> list[str]:
        return []

    def use_pause(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self._running)

    def stats(self) -> Stats:
        self._stats.running = len(self._running)
        return self._stats

    def step(self) -> list[Delta]:
        time.sleep(0.001)  # no model is so fast that its words pile up in front of the server
        deltas = []
        for new, said in list(self._running.values()):
            orders = dict(order.partition("=")[::2] for order in (new.cache_salt or "").split(","))
            if "silent" in orders:
                continue
            made = self._vector(new, orders) if new.task is not Task.GENERATE else self._say(new, said, orders)
            deltas += made
            if made[0].finish is not None:
                del self._running[new.id]
        return deltas

    def _say(self, new: NewRequest, said: int, orders: dict[str, str]) -> list[Delta]:
        sampling = new.sampling
        assert isinstance(sampling, SamplingParams)
        if "error" in orders and said:
            return [failed(new, i, orders["error"]) for i in range(sampling.n)]
        speech = [*new.token_ids[1:], self._eos]
        limit = len(speech) if sampling.max_tokens is None else min(len(speech), sampling.max_tokens)
        ids = speech[said : min(said + int(orders.get("tokens", 1)), limit)]
        said += len(ids)
        self._running[new.id] = (new, 0 if "stuck" in orders else said)
        finish = FinishReason.STOP if said == len(speech) else FinishReason.LENGTH if said >= limit else None
        value = float(orders.get("logprob", "-0.5"))
        logprobs = [TokenLogprob(i, value, 1, [(i, value), (self._eos, -math.inf)]) for i in ids]
        return [
            Delta(
                id=new.id,
                index=i,
                token_ids=ids,
                logprobs=None if sampling.logprobs is None else logprobs,
                finish=None if "stuck" in orders else finish,
            )
            for i in range(sampling.n)
        ]

    def _vector(self, new: NewRequest, orders: dict[str, str]) -> list[Delta]:
        if "error" in orders and len(new.token_ids) > 4:
            return [failed(new, 0, orders["error"])]
        values = [1.0, -2.0, math.inf if "wide" in orders and len(new.token_ids) > 4 else 0.5]
        return [Delta(id=new.id, vector=struct.pack("<3f", *values), finish=FinishReason.STOP)]


def failed(new: NewRequest, index: int, code: str) -> Delta:
    return Delta(id=new.id, index=index, finish=FinishReason.ERROR, error="as ordered", error_code=code)


def launch_echo(boot: wire.Boot, progress: Callable[[str, float], None]) -> tuple[wire.Planned, child.Build]:
    """Plan the real model; run the echo instead of it."""
    planned, _ = child.launch_model(boot, progress)

    def build(progress: Callable[[str, float], None]) -> tuple[Any, dict[str, Any]]:
        return EchoEngine(eos=2), planned.card

    return planned, build
