"""One model's place in the server, whatever engine fills it at the moment: routes submit here and need not know.

`Slot` is what routes see. `keeper.Keeper` starts, restarts and replaces one engine; `replicas.Replicas` divides
requests among several keepers. An engine is whatever answers `Engine`, which `bridge.EngineClient` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from anycore.config import ModelConfig
from anycore.engine.request import NewRequest
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError, Conflict, Overloaded, Unavailable
from anycore.server import wire
from anycore.server.phases import Phase, Status
from anycore.server.stream import Stream

IDLE = "idle"  # the code of a model that was unloaded because nobody asked for it: the next request brings it back
NOT_CHECKED = "remote: not checked"  # what is known about a model of another server before it is asked

REFUSALS = {
    Phase.DEAD: ("has lost its engine", "engine_dead"),
    Phase.DEGRADED: ("is being restarted", "model_restarting"),
    Phase.UNLOADED: ("is unloaded", "model_unloaded"),
    Phase.DRAINING: ("is being unloaded", "model_unloaded"),
}
"""What a request is told about a model that cannot take it, and the code; in all other phases it is loading."""


class Engine(Protocol):
    """What answers one model's requests. It is started once, and ends once."""

    phase: Phase
    since: float  # of the phase
    activity: str
    fraction: float
    failure: AnycoreError | None  # why it is dead, if nobody asked it to end
    card: dict[str, Any]
    stats: Stats
    heard: float  # when it last did something
    dead: asyncio.Event
    planned: asyncio.Future[wire.Planned]
    ready: asyncio.Future[None]

    @property
    def live(self) -> int: ...
    async def start(self) -> None: ...
    def load(self) -> None: ...
    def forget_paths(self) -> None: ...
    def submit(self, request: NewRequest) -> Stream: ...
    def drain(self) -> None: ...
    def fail_all(self, error: AnycoreError) -> None: ...
    def kill(self) -> None: ...
    async def stop(self) -> None: ...


class Slot:
    """The engine in use, if there is one, and what to tell those who ask while there is none."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.name = config.names[0]
        self._card: dict[str, Any] = {}
        self.engine: Engine | None = None  # in use
        self.next: Engine | None = None  # being loaded
        self.leaving: list[Engine] = []  # replaced; they finish what they have
        self.failure: AnycoreError | None = None  # why it is dead
        self.dead = asyncio.Event()
        self._stated = Status(phase=Phase.STARTING, code="model_starting")
        self._holding = False  # no engine takes requests, and one soon will: let them wait
        self._closed = False  # the server stops
        self._what = ""  # is being changed
        self._held = 0
        self._changed = asyncio.Event()

    # --- what routes ask ----------------------------------------------------------------------------------------

    @property
    def card(self) -> dict[str, Any]:
        """Of the engine in use, or of the last one; {} before one is planned."""
        return self._card

    @property
    def statuses(self) -> list[Status]:
        """The phase of each engine that the model is to have."""
        return [self.status]

    @property
    def status(self) -> Status:
        """The phase of the model, with the progress of what is being loaded."""
        stated, loading = self._stated, self.next
        if loading is None:
            return stated
        if stated.phase in (Phase.STARTING, Phase.LOADING) and loading.phase is not Phase.DEAD:
            phase = Phase.WARMING if loading.phase is Phase.READY else loading.phase
            stated = Status(phase=phase, code=f"model_{phase.value}", since=loading.since)
        return msgspec.structs.replace(stated, activity=loading.activity, fraction=loading.fraction)

    @property
    def takes(self) -> bool:
        """Whether a request will be answered, at once or after a wait."""
        return not self._closed and (self.serves or self._holding or self._stated.code == IDLE)

    @property
    def serves(self) -> bool:
        """Whether a request would be answered at once."""
        return self.engine is not None and self.engine.phase is Phase.READY and not self._holding

    @property
    def live(self) -> int:
        """Requests that have not ended, those that wait for an engine included."""
        return self._held + sum(engine.live for engine in self.engines)

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.engine, self.next, *self.leaving) if engine is not None]

    def refusal(self) -> Unavailable:
        """What to tell a request that cannot be taken."""
        if self._closed:
            return Unavailable("the server is shutting down and takes no new requests", code="shutting_down")
        what, code = REFUSALS.get(self.status.phase, ("is still loading", "model_loading"))
        return Unavailable(f"model {self.name!r} {what}; /ready says when it is ready", code=code)

    @asynccontextmanager
    async def submit(self, request: NewRequest) -> AsyncIterator[Stream]:
        """Send a request to the engine in use; where one is on its way, wait for it.

        Raises:
            Unavailable: there is none, and none will come by itself.
            Overloaded: too many wait already.
        """
        engine = self.engine
        if engine is None or not self.serves:
            engine = await self._wait_for_engine()
        async with engine.submit(request) as stream:
            yield stream
        self._answered()

    # --- the server's life --------------------------------------------------------------------------------------

    async def plan(self) -> None:
        """Go as far as it takes to know that the model can be served.

        Raises:
            AnycoreError: it cannot.
        """
        raise NotImplementedError

    async def load(self) -> None:
        """Get ready for requests. Raises AnycoreError."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all that was started."""
        raise NotImplementedError

    # --- for those who fill it ----------------------------------------------------------------------------------

    async def wake(self) -> None:
        """Bring back what was unloaded because it was idle.

        Raises:
            AnycoreError: it cannot be loaded any more.
        """
        raise NotImplementedError

    async def reload(self, checkpoint: str | None = None) -> None:
        """Take the weights as they are on disk now, or those of another folder.

        Raises:
            Conflict: something else is being changed.
            AnycoreError: it cannot be served like this; what was served before still is.
        """
        raise NotImplementedError

    async def move(self, backend: str, devices: tuple[int, ...] = (0,)) -> None:
        """Go on elsewhere, on a device for each engine in turn. Raises as `reload`."""
        raise NotImplementedError

    async def unload(self) -> None:
        """Finish what runs, and free all that the model takes, until `bring_back`. Raises Conflict."""
        raise NotImplementedError

    async def bring_back(self) -> None:
        """Load what was unloaded; nothing where it is loaded. Raises as `reload`."""
        raise NotImplementedError

    def _check_unchanging(self, work: Coroutine[Any, Any, None]) -> None:
        """Refuse a change that comes when the server stops, or beside another one.

        Raises:
            Unavailable, Conflict: it is not carried out.
        """
        if not self._closed and not self._what:
            return
        work.close()
        if self._closed:
            raise self.refusal()
        raise Conflict(f"model {self.name!r} is {self._what}: try again when that is done")

    def _answered(self) -> None:
        """A request has been answered."""

    async def _wait_for_engine(self) -> Engine:
        if self._held >= max(1, self.config.max_queued):
            raise Overloaded(f"{self._held} requests wait already for model {self.name!r} to be loaded")
        self._held += 1
        try:
            while True:
                if not self.takes:
                    raise self.refusal()
                if self.engine is not None and self.serves:
                    return self.engine
                if self._holding:
                    await self._changed.wait()
                else:
                    await self.wake()
        finally:
            self._held -= 1

    def _state(self, phase: Phase, code: str, reason: str = "", *, holding: bool = False) -> None:
        """Say what is the matter, and let those who wait look again. Of a server that stops, only deaths are news."""
        if self._closed and phase is not Phase.DEAD:
            return
        self._stated = Status(phase=phase, code=code, reason=reason)
        self._holding = holding
        self._changed.set()
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Take nothing new, and end with an error what does not run yet."""
        if not self.dead.is_set():
            self._state(Phase.DRAINING, "shutting_down")
        self._closed = True
        for engine in self.engines:
            engine.drain()

    def fail_all(self, error: AnycoreError) -> None:
        for engine in self.engines:
            engine.fail_all(error)

    def kill(self) -> None:
        for engine in self.engines:
            engine.kill()
