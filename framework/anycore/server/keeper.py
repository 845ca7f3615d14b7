"""A slot whose engine is started here: first, again after its death, and anew with other settings.

Whatever replaces an engine is made beside it and becomes the engine in use in one turn of the event loop, once it is
ready; the one before finishes what it has. Where two do not fit, the first is drained before, and requests wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from anycore.config import ModelConfig
from anycore.errors import AnycoreError, BadRequest, DoesNotFit, Unavailable, Unsupported
from anycore.server import wire
from anycore.server.logs import log_crash
from anycore.server.phases import Phase
from anycore.server.slot import IDLE, Engine, Slot

HOUR = 3600.0
FIRST_DELAY = 0.5  # before the second restart in a row; the first comes at once, each further one after twice the time
LONGEST_DELAY = 60.0
POLL_SECONDS = 0.05
ROOM = ("num_blocks", "max_model_len", "max_num_seqs")  # of the card: what a successor must have no less of

Make = Callable[[ModelConfig, dict[str, int]], Engine]
"""Settings and the least numbers of the card -> an engine that has not been started."""

Read = Callable[[Slot, wire.Planned], Awaitable[Callable[[], None]]]
"""Read what the server needs beside the engine, such as the tokenizer; what it returns puts that into use."""

log = logging.getLogger(__name__)


class Keeper(Slot):
    """Keeps one model served."""

    def __init__(
        self,
        config: ModelConfig,
        make: Make,
        read: Read,
        *,
        restarts: int | None = 0,
        restarted: Callable[[str], None] = lambda reason: None,
        gave_up: Callable[[], None] = lambda: None,
        shared: bool = False,
    ) -> None:
        """
        Args:
            restarts: an hour, at most; after those, `dead` is set. None: at once and always, for engines that another
                process starts.
            restarted: told each one's reason.
            gave_up: told when there were too many.
            shared: whether other processes use the same engines, and know only where they are.
        """
        super().__init__(config)
        self._make = make
        self._read = read
        self._limit = restarts
        self._on_restart = restarted
        self._on_give_up = gave_up
        self._shared = shared
        self._restarted: deque[float] = deque()  # when, within the last hour
        self._in_a_row = 0  # deaths since the last request that was answered
        self._change: asyncio.Task[None] | None = None  # asked for by an operator, or by a request that woke it
        self._was_planned = False  # the engine that was brought up last
        self._revival: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the first engine ---------------------------------------------------------------------------------------

    async def plan(self) -> None:
        self.next = self._make(self.config, {})
        await self.next.start()
        self.planned = await self.next.planned
        self._card = self.planned.card

    async def load(self) -> None:
        assert self.next is not None
        await self._complete(self.next, self.planned)

    # --- changes ------------------------------------------------------------------------------------------------

    async def reload(self, checkpoint: str | None = None) -> None:
        await self.change(reloaded(self.config, checkpoint), "reloading")

    async def move(self, backend: str, devices: tuple[int, ...] = (0,)) -> None:
        await self.change(moved(self.config, backend, devices), "moving")

    async def change(self, wanted: ModelConfig, what: str) -> None:
        """Go on with other settings. Raises as `reload`."""
        await self._run(what, self._replace(wanted, what))

    async def unload(self) -> None:
        await self._run("unloading", self._unload("unloaded", holding=False))

    async def bring_back(self) -> None:
        if self.engine is None or self._revival is not None or self.dead.is_set():
            await self._run("loading", self._replace(self.config, "loading"))

    def rest(self) -> None:
        """Begin to unload the model until the next request."""
        if self._change is None:
            self._begin("unloading", self._unload(IDLE, holding=True))

    def rouse(self) -> None:
        """Begin to bring it back."""
        if self._change is None:
            self._begin("loading", self._replace(self.config, "loading", holding=True))

    async def wake(self) -> None:
        self.rouse()
        change = self._change
        assert change is not None
        while not change.done() and not self._closed:
            await asyncio.wait({change}, timeout=POLL_SECONDS)
        if change.done() and (error := change.exception()) is not None:
            message = error.message if isinstance(error, AnycoreError) else "the log says why"
            raise Unavailable(f"model {self.name!r} could not be loaded again: {message}", code="load_failed")

    async def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Carry out a change that nothing ends half-way but the end of the server."""
        if self._shared:
            work.close()
            raise Unsupported("models are changed only where one front serves them: leave --api-servers at 1")
        self._check_unchanging(work)
        await asyncio.shield(self._begin(what, work))

    def _begin(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def change() -> None:
            await self._end_revival()
            try:
                await work
                log.info("%s: %s is done", self.name, what)
            except AnycoreError as error:
                log.error("%s: %s failed: %s", self.name, what, error.message)
                raise
            finally:
                self._change, self._what = None, ""
                self._look_after()

        self._what = what
        self._change = asyncio.create_task(change())
        self._change.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to whoever waits
        return self._change

    async def _replace(self, wanted: ModelConfig, what: str, *, holding: bool = False) -> None:
        """Put an engine with other settings into use."""
        old = self.engine
        if old is None or old.dead.is_set():
            await self._fill(old, wanted, holding)
            return
        self._state(Phase.READY, what)
        same_place = (wanted.backend, wanted.device) == (self.config.backend, self.config.device)
        room = {name: old.card[name] for name in ROOM if old.card.get(name)} if same_place else {}
        try:
            await self._bring_up(wanted, room)
        except AnycoreError as error:
            if not old.dead.is_set():
                self._state(Phase.READY, "ready")
            if not (same_place and error.code == DoesNotFit.code and self._was_planned):
                raise
            log.info("%s: beside the engine in use %s", self.name, error.message)
            await self._replace_alone(old, wanted, what)

    async def _fill(self, dead: Engine | None, wanted: ModelConfig, holding: bool) -> None:
        """The same where no engine is in use."""
        before = self._stated
        self._state(Phase.LOADING, "model_loading", holding=holding)
        if dead is not None:
            await dead.stop()
            self._forget(dead)
        try:
            await self._bring_up(wanted)
        except AnycoreError as error:
            self._state(before.phase, before.code, before.reason)
            if before.phase is not Phase.UNLOADED:
                self._revive(error)
            raise

    async def _replace_alone(self, old: Engine, wanted: ModelConfig, what: str) -> None:
        """The same where two engines do not fit: requests wait meanwhile."""
        self._state(Phase.DRAINING, what, "two engines do not fit beside each other", holding=True)
        await self._empty(old)
        try:
            await self._bring_up(wanted)
        except AnycoreError:
            try:
                await self._bring_up(self.config)
            except AnycoreError as error:
                self._revive(error)
            raise

    async def _unload(self, code: str, *, holding: bool) -> None:
        if self.engine is not None:
            self._state(Phase.DRAINING, code, holding=holding)
            await self._empty(self.engine)
        self._state(Phase.UNLOADED, code)

    async def _empty(self, engine: Engine) -> None:
        """Wait until an engine has finished, and end it."""
        while engine.live:
            await asyncio.sleep(POLL_SECONDS)
        await engine.stop()
        self._forget(engine)

    def _forget(self, engine: Engine | None) -> None:
        if self.engine is engine:
            self.engine = None

    # --- one engine ---------------------------------------------------------------------------------------------

    async def _bring_up(self, config: ModelConfig, at_least: dict[str, int] | None = None) -> None:
        """Start an engine and put it into use once it is ready; one that does not get there is ended.

        Raises:
            AnycoreError: why it did not.
        """
        self._was_planned = False
        engine = self.next = self._make(config, at_least or {})
        try:
            await engine.start()
            planned = await engine.planned
            self._was_planned = True
            await self._complete(engine, planned)
            self.config = config
        finally:
            if self.engine is not engine:
                self.next = None
                await engine.stop()

    async def _complete(self, engine: Engine, planned: wire.Planned) -> None:
        engine.load()
        adopt, _ = await asyncio.gather(self._read(self, planned), engine.ready)
        adopt()
        old, self.engine, self.next, self._card = self.engine, engine, None, engine.card
        self.failure = None
        self.dead.clear()
        self._state(Phase.READY, "ready")
        self._spawn(self._watch(engine))
        if self.config.keep_alive is not None:
            self._spawn(self._watch_idle(engine, self.config.keep_alive))
        if old is not None:
            self.leaving.append(old)
            self._spawn(self._retire(old))

    async def _retire(self, engine: Engine) -> None:
        """Let an engine that has been replaced finish, and end it."""
        await self._empty(engine)
        self.leaving.remove(engine)

    async def _watch(self, engine: Engine) -> None:
        """See an engine's death."""
        await engine.dead.wait()
        self._look_after()

    async def _watch_idle(self, engine: Engine, seconds: float) -> None:
        """Unload the model once nobody has asked for it for so long."""
        while self.engine is engine and not engine.dead.is_set():
            if self.idle_seconds >= seconds:
                self.rest()
                return
            await asyncio.sleep(max(seconds - self.idle_seconds, POLL_SECONDS))

    @property
    def idle_seconds(self) -> float:
        """Since the engine in use last had anything to do; 0 where there is none, or something is being changed."""
        engine = self.engine
        if engine is None or self._change is not None or engine.live or engine.stats.running or engine.stats.waiting:
            return 0.0
        return time.monotonic() - engine.heard

    # --- restarts -----------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self._in_a_row = 0

    def _look_after(self) -> None:
        """Restart the engine in use if it has died."""
        engine = self.engine
        if engine is None or engine.failure is None or self._closed or self._revival is not None:
            return
        if self._change is None:
            self._revive(engine.failure)
        else:  # which brings another engine, or comes back here
            self._state(Phase.DEGRADED, engine.failure.code or "engine_dead", engine.failure.message)

    def _revive(self, failure: AnycoreError) -> None:
        self._revival = self._spawn(self._restart(failure))

    async def _restart(self, failure: AnycoreError) -> None:
        """Start engines until one is ready, or there were too many."""
        try:
            while True:
                if not self._may_restart():
                    self._give_up(failure)
                    return
                code, delay = failure.code or "engine_dead", self._delay()
                limit = "" if self._limit is None else f" of at most {self._limit} an hour"
                again = f"restart {len(self._restarted)}{limit}"
                self._state(Phase.DEGRADED, code, f"{failure.message}; {again}")
                if self.engine is not None:
                    await self.engine.stop()  # its process is gone, and with it what it held of the device
                    self._forget(self.engine)
                log.warning("%s: %s, in %g s", self.name, again, delay)
                self._on_restart(code)
                await asyncio.sleep(delay)
                try:
                    await self._bring_up(self.config)
                except AnycoreError as error:
                    log.error("%s: the restart failed: %s", self.name, error.message)
                    failure = error
                    continue
                log.info("%s: its engine is back", self.name)
                return
        finally:
            self._revival = None

    def _may_restart(self) -> bool:
        """Count a restart, if there may be one."""
        now = time.monotonic()
        while self._restarted and now - self._restarted[0] > HOUR:
            self._restarted.popleft()
        if self._limit is not None and len(self._restarted) >= self._limit:
            return False
        self._restarted.append(now)
        return True

    def _delay(self) -> float:
        self._in_a_row += 1
        if self._in_a_row == 1 or self._limit is None:
            return 0.0
        return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (self._in_a_row - 2))

    def _give_up(self, failure: AnycoreError) -> None:
        if self._limit:
            log.error("%s: %d restarts within an hour (--engine-restarts): giving up", self.name, self._limit)
        self.failure = failure
        self._state(Phase.DEAD, failure.code or "engine_dead", failure.message)
        self.dead.set()
        self._on_give_up()

    async def _end_revival(self) -> None:
        """Let a change have the slot that an engine was to be restarted in."""
        if self._revival is not None:
            self._revival.cancel()
            with suppress(asyncio.CancelledError):
                await self._revival

    def drain(self) -> None:
        super().drain()
        if self._revival is not None:
            self._revival.cancel()

    # --- the end ------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        self._closed = True
        running = [task for task in (self._change, *self._tasks) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines), return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                log_crash(log, f"{self.name}: looking after its engine failed", error)
                self._give_up(Unavailable("the server lost track of this engine", code="engine_dead"))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def reloaded(config: ModelConfig, checkpoint: str | None) -> ModelConfig:
    """Settings with the weights of another folder, or those there are."""
    return config if checkpoint is None else replace(config, checkpoint=checkpoint)


def moved(config: ModelConfig, backend: str, devices: tuple[int, ...]) -> ModelConfig:
    """Settings for another backend and device.

    Raises:
        BadRequest: there is more than one device, and one engine.
    """
    if len(devices) != 1:
        raise BadRequest(
            f"model {config.names[0]!r} has one engine: name one device, not {len(devices)}", param="devices"
        )
    return replace(config, backend=backend, device=devices[0])
