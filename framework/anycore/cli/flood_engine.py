"""An engine that computes nothing, before which a front is measured: `front_times` starts it."""

from __future__ import annotations

import random
import sys
import time

import msgspec

from anycore.engine.request import Delta, FinishReason, NewRequest
from anycore.engine.stats import Stats
from anycore.server import child, wire

VOCABULARY = range(1000, 20_000)


class FloodEngine:
    """A random token a step for every request there is. A step takes as many microseconds as a request's seed says."""

    def __init__(self, vocabulary: int = VOCABULARY.stop) -> None:
        self._tokens = [token for token in VOCABULARY if token < vocabulary] or list(range(vocabulary))
        self._seconds = 0.0
        self._left: dict[str, int] = {}
        self._next = time.monotonic()

    def add(self, new: NewRequest) -> None:
        assert new.sampling is not None
        self._left[new.id] = new.sampling.max_tokens or 16
        self._seconds = (new.sampling.seed or 0) / 1e6

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._left.pop(request_id, None)

    def drain(self) -> list[str]:
        return []

    def has_work(self) -> bool:
        return bool(self._left)

    def use_pause(self) -> bool:
        return False

    def stats(self) -> Stats:
        return Stats(running=len(self._left))

    def step(self) -> list[Delta]:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._seconds
        deltas = []
        for name, left in list(self._left.items()):
            self._left[name] = left - 1
            deltas.append(Delta(id=name, token_ids=[random.choice(self._tokens)]))
            if left == 1:
                deltas[-1].finish = FinishReason.LENGTH
                del self._left[name]
        return deltas


def launch(planned: wire.Planned, vocabulary: int) -> tuple[wire.Planned, child.Build]:
    return planned, lambda progress: (FloodEngine(vocabulary), planned.card)


if __name__ == "__main__":
    plan, tokens = msgspec.json.decode(sys.argv[1], type=wire.Planned), int(sys.argv[2])
    sys.exit(child.main(lambda boot, progress: launch(plan, tokens)))
