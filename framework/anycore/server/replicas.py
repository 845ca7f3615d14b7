"""Several engines of one model behind one slot: each request goes to one of them, and changes go through them in turn.

Each has a keeper of its own, so that it is restarted, reloaded and moved as an engine that stands alone is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from anycore.config import ModelConfig
from anycore.engine.request import NewRequest
from anycore.errors import AnycoreError, BadRequest
from anycore.server.keeper import Keeper, moved, reloaded
from anycore.server.phases import BEHIND, Phase, Status
from anycore.server.routing import Holders, chain, choose, slack_of
from anycore.server.slot import IDLE, Engine, Slot
from anycore.server.stream import Stream

POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


def parts_of(config: ModelConfig) -> list[ModelConfig]:
    """The settings of each engine of a model."""
    placement = config.placement
    if len(placement) == 1:
        return [replace(config, replicas=None, devices=(), device=placement[0])]
    return [replace(config, replicas=None, devices=(), device=device, keep_alive=None) for device in placement]


class Replicas(Slot):
    """A slot that is served as long as one of its engines is.

    What each engine has to do is known from its last report, and from what this front has sent it since.
    """

    def __init__(self, config: ModelConfig, keepers: Sequence[Keeper]) -> None:
        super().__init__(config)
        self.keepers = list(keepers)
        self._loaded = False  # all were, for the first time
        self._open = [0] * len(self.keepers)  # sequences sent to each one that have not ended
        self._holders = Holders(len(self.keepers))
        self._seen: list[Engine | None] = [None] * len(self.keepers)  # the engines that `_holders` is about
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- what routes ask ----------------------------------------------------------------------------------------

    @property
    def card(self) -> dict[str, Any]:
        """That of one engine, with what all can do: the shortest of their lengths, and their sequences together."""
        cards = [keeper.card for keeper in self.keepers]
        if not all(cards):
            return {}
        return {
            **cards[0],
            "max_model_len": min(card["max_model_len"] for card in cards),
            "max_num_seqs": sum(card["max_num_seqs"] for card in cards),
            "replicas": len(cards),
        }

    @property
    def statuses(self) -> list[Status]:
        return [keeper.status for keeper in self.keepers]

    @property
    def status(self) -> Status:
        """That of all where they agree; degraded where some serve and others do not."""
        statuses = self.statuses
        if self._closed and not self.dead.is_set():
            return self._stated
        serving = sum(keeper.serves for keeper in self.keepers)
        worst = min(statuses, key=lambda status: BEHIND.index(status.phase))
        if not self._loaded or serving == 0:
            return worst
        if serving == len(statuses):  # of these, one may be about to be replaced
            return next((status for status in statuses if status.code != "ready"), worst)
        waits = next(i for i, keeper in enumerate(self.keepers) if not keeper.serves)
        what = statuses[waits]
        reason = f"{serving} of {len(statuses)} engines serve; engine {waits}: {what.reason or what.phase.value}"
        return msgspec.structs.replace(what, phase=Phase.DEGRADED, reason=reason)

    @property
    def takes(self) -> bool:
        return self._loaded and not self._closed and any(keeper.takes for keeper in self.keepers)

    @property
    def serves(self) -> bool:
        return self._loaded and any(keeper.serves for keeper in self.keepers)

    @property
    def live(self) -> int:
        return sum(keeper.live for keeper in self.keepers)

    @property
    def engines(self) -> list[Engine]:
        return [engine for keeper in self.keepers for engine in keeper.engines]

    @asynccontextmanager
    async def submit(self, request: NewRequest) -> AsyncIterator[Stream]:
        if not self.takes:
            raise self.refusal()
        for keeper in self.keepers:
            if keeper.status.code == IDLE and keeper.status.phase is Phase.UNLOADED:
                keeper.rouse()
        count = request.sampling.n if request.sampling else 1
        number = self._route(request, count)
        self._open[number] += count
        try:
            async with self.keepers[number].submit(request) as stream:
                yield stream
        finally:
            self._open[number] -= count

    def _route(self, request: NewRequest, count: int) -> int:
        """Choose the replica for a request, and remember which blocks it gets by that."""
        able = [keeper.serves for keeper in self.keepers]
        if not any(able):  # one that is on its way will do
            able = [keeper.takes for keeper in self.keepers]
        loads = [self._load(i) if takes else None for i, takes in enumerate(able)]
        hashes = self._blocks(request)
        matches = self._holders.matches(hashes)
        seats = min(keeper.card["max_num_seqs"] for keeper in self.keepers)
        most = seats + self.config.max_queued - count + 1
        chosen = choose(loads, matches, slack_of(seats), most, self._turn)
        self._holders.add(hashes, chosen)
        self._turn = (chosen + 1) % len(self.keepers)
        return chosen

    def _load(self, number: int) -> int:
        """Sequences that a replica runs or has waiting, those of other fronts included as far as it has said so."""
        engine = self.keepers[number].engine
        if engine is not self._seen[number]:
            self._holders.forget(number)
            self._seen[number] = engine
        reported = 0 if engine is None else engine.stats.running + engine.stats.waiting
        return max(self._open[number], reported)

    def _blocks(self, request: NewRequest) -> list[bytes]:
        card = self.keepers[0].card
        if not card.get("prefix_caching") or not card.get("block_size"):
            return []
        return chain(request.token_ids, card["block_size"], request.cache_salt)

    # --- the server's life --------------------------------------------------------------------------------------

    async def plan(self) -> None:
        await asyncio.gather(*(keeper.plan() for keeper in self.keepers))

    async def load(self) -> None:
        await asyncio.gather(*(keeper.load() for keeper in self.keepers))
        self._loaded = True
        self._spawn(self._watch())
        if self.config.keep_alive is not None:
            self._spawn(self._watch_idle(self.config.keep_alive))

    async def _watch(self) -> None:
        """The model is lost with the last of its engines."""
        while (alive := next((keeper for keeper in self.keepers if not keeper.dead.is_set()), None)) is not None:
            await alive.dead.wait()
        self.failure = self.keepers[0].failure
        self.dead.set()

    async def _watch_idle(self, seconds: float) -> None:
        """Unload all engines once nobody has asked for the model for so long."""
        while True:
            idle = [keeper.idle_seconds for keeper in self.keepers if keeper.engine is not None]
            if idle and min(idle) >= seconds and not self._what:
                for keeper in self.keepers:
                    keeper.rest()
            await asyncio.sleep(max(seconds - min(idle, default=0.0), POLL_SECONDS))

    def drain(self) -> None:
        if not self.dead.is_set():
            self._state(Phase.DRAINING, "shutting_down")
        self._closed = True
        for keeper in self.keepers:
            keeper.drain()

    async def stop(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *(keeper.stop() for keeper in self.keepers), return_exceptions=True)

    # --- changes ------------------------------------------------------------------------------------------------

    async def reload(self, checkpoint: str | None = None) -> None:
        await self._run("reloading", self._each("reloading", lambda number, part: reloaded(part, checkpoint)))

    async def move(self, backend: str, devices: tuple[int, ...] = (0,)) -> None:
        if len(devices) > len(self.keepers):
            raise BadRequest(
                f"model {self.name!r} has {len(self.keepers)} replicas: name at most as many devices, "
                f"not {len(devices)}",
                param="devices",
            )
        places = [devices[i % len(devices)] for i in range(len(self.keepers))]
        await self._run("moving", self._each("moving", lambda number, part: moved(part, backend, (places[number],))))

    async def unload(self) -> None:
        async def each() -> None:
            for keeper in self.keepers:
                await keeper.unload()

        await self._run("unloading", each())

    async def bring_back(self) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*(keeper.bring_back() for keeper in self.keepers))

        await self._run("loading", all_at_once())

    async def _each(self, what: str, wanted: Callable[[int, ModelConfig], ModelConfig]) -> None:
        """Change one engine after the other. Where one cannot be, those before it get their settings back."""
        before = [keeper.config for keeper in self.keepers]
        for number, keeper in enumerate(self.keepers):
            try:
                await keeper.change(wanted(number, keeper.config), what)
            except AnycoreError as error:
                for earlier, config in zip(self.keepers[:number], before, strict=False):
                    try:
                        await earlier.change(config, what)
                    except AnycoreError as again:
                        log.error("%s: %s cannot be taken back: %s", self.name, what, again.message)
                error.message = f"engine {number} of {len(self.keepers)}: {error.message}"
                raise

    async def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        """Carry out a change of all engines, which goes on where whoever asked for it leaves."""
        self._check_unchanging(work)

        async def change() -> None:
            try:
                await work
            finally:
                self._what = ""

        self._what = what
        await asyncio.shield(self._spawn(change()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to whoever waits
        return task
