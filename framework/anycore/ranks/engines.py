"""The engine in each rank: the first one takes requests and tells the others, which do the same in the same order.

What a step does follows from what came before it and from logits, which ranks have in common. All else that it could
follow from is told: the clock, seeds that nobody gave, and when a grammar is ready.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any, Protocol

import msgspec

from anycore.engine.engine import Engine
from anycore.engine.grammar import Grammars, GrammarState
from anycore.engine.request import Delta, NewRequest
from anycore.engine.searches import Texts
from anycore.errors import AnycoreError
from anycore.ranks.messages import Abort, Add, Compiled, End, Event, Forget, Told, Turn


class Teller(Protocol):
    """What the first rank needs of its group."""

    def tell(self, message: Told) -> None: ...
    def check(self, error: BaseException | None = None) -> None: ...
    def close(self) -> None: ...


class Listener(Protocol):
    """What the others need of theirs."""

    def receive(self) -> Told: ...


class Time:
    """A clock that stands still where it is told to."""

    now: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.now is None else self.now


class RankEngine(Engine):
    """What both kinds have in common."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        self.time = Time()
        super().__init__(*parts, clock=self.time, **settings)

    def _take_read(self, texts: Texts) -> None:
        wait([texts.get()])  # it is read once: until then no rank goes on, rather than each at its own time
        super()._take_read(texts)


class LeadingEngine(RankEngine):
    """The first rank's. Until `lead` is called it is an engine as any other."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._group: Teller | None = None
        self._events: list[Event] = []

    def lead(self, group: Teller) -> None:
        """Tell the group what this engine does from now on."""
        self._group = group

    def use_pause(self) -> bool:
        return self._group is None and super().use_pause()  # the other ranks would not do the same

    def close(self) -> None:
        """End the other ranks, and with them this engine."""
        if self._group is not None:
            self._group.close()

    def add(self, new: NewRequest) -> None:
        if self._group is None:
            super().add(new)
            return
        self._group.check()
        self.time.now = time.monotonic()
        new = self._seeded(new)
        super().add(new)
        self._events.append(Add(new, self.time.now))

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._group is not None and request_id in self._live.requests:
            self._events.append(Abort(request_id, index))
        super().abort(request_id, index)

    def reset_prefix_cache(self) -> None:
        if self._group is not None:
            self._events.append(Forget())
        super().reset_prefix_cache()

    def step(self) -> list[Delta]:
        if self._group is None:
            return super().step()
        self._group.check()
        self.time.now = time.monotonic()
        self._group.tell(Turn(self.time.now, self._events))
        self._events = []
        try:
            return super().step()
        except BaseException as error:
            try:
                self._group.check(error)
            finally:
                self._group.close()  # the others have done the step, or wait within it: they are not in step any more
            raise

    def _take_compiled(self, grammars: Grammars) -> None:
        told = grammars if self._group is None else _Telling(grammars, self._group)
        super()._take_compiled(told)

    def _seeded(self, new: NewRequest) -> NewRequest:
        """The request with a seed, unless it has one or each rank draws the same."""
        if new.sampling is None or new.sampling.seed is not None or self._admission.seed:
            return new
        seed = int.from_bytes(os.urandom(8), "little", signed=True)
        return msgspec.structs.replace(new, sampling=msgspec.structs.replace(new.sampling, seed=seed))


class FollowingEngine(RankEngine):
    """Any other rank's."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._link: Listener | None = None

    def follow(self, link: Listener) -> None:
        """Do what the first rank does, until it is done."""
        self._link = link
        while not isinstance(turn := link.receive(), End):
            assert isinstance(turn, Turn), turn
            for event in turn.events:
                self._take(event)
            self.time.now = turn.now
            self.step()

    def _take(self, event: Event) -> None:
        if isinstance(event, Add):
            self.time.now = event.now
            self.add(event.request)
        elif isinstance(event, Abort):
            self.abort(event.id, event.index)
        else:
            self.reset_prefix_cache()

    def _take_compiled(self, grammars: Grammars) -> None:
        assert self._link is not None
        super()._take_compiled(_Told(grammars, self._link))


class _Telling(Grammars):
    """Grammars that are ready where they were compiled first, of which the others are told."""

    def __init__(self, grammars: Grammars, group: Teller) -> None:
        self.awaited = grammars.awaited
        self._grammars, self._group = grammars, group

    def ready(self, now: float, idle: bool) -> Iterator[tuple[str, GrammarState | AnycoreError]]:
        found = list(self._grammars.ready(now, idle))
        failed = [(name, o.message, o.code) for name, o in found if isinstance(o, AnycoreError)]
        self._group.tell(Compiled([name for name, o in found if not isinstance(o, AnycoreError)], failed))
        order = sorted(found, key=lambda each: isinstance(each[1], AnycoreError))
        return iter(order)


class _Told(Grammars):
    """Grammars that are ready when that is told; the own one is waited for."""

    def __init__(self, grammars: Grammars, link: Listener) -> None:
        self.awaited = grammars.awaited
        self._link = link

    def ready(self, now: float, idle: bool) -> Iterator[tuple[str, GrammarState | AnycoreError]]:
        told = self._link.receive()
        assert isinstance(told, Compiled), told
        for name in told.ready:
            yield name, self.awaited.pop(name).compiled.result()
        for name, message, code in told.failed:
            del self.awaited[name]
            yield name, AnycoreError(message, code=code)
