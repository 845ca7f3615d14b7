"""The life of one server: engines up, HTTP from the start, drain, down. `run.serve` makes it and hands it signals."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from anycore import plugins
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import Unavailable
from anycore.server import crowd, wire
from anycore.server.app import create_app
from anycore.server.aside import aside
from anycore.server.auth import Guard
from anycore.server.bridge import EngineClient
from anycore.server.fronts import FrontBoot, Fronts
from anycore.server.http import HttpServer
from anycore.server.keeper import Keeper
from anycore.server.metrics import Metrics, ModelMetrics
from anycore.server.phases import Phase
from anycore.server.port import BACKLOG
from anycore.server.replicas import Replicas, parts_of
from anycore.server.slot import Engine, Slot
from anycore.server.state import Reading, ServedModel, ServerState, Stamp, read, stamp_of
from anycore.server.tally import Tally
from anycore.server.tls import Certificate
from anycore.server.turns import check_tools
from anycore.text.folder_tokenizer import import_reader_for

DEAD_SECONDS = 3.0  # from an engine's death to the end of the server: probes see it, other models finish what they can
POLL_SECONDS = 0.02

log = logging.getLogger(__name__)


class Server:
    """Serves models over HTTP until told to stop. Lives in one event loop."""

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ModelConfig],
        guard: Guard,
        directory: Path,
        *,
        certificate: Certificate | None = None,
        progress: Callable[[str, float], None] | None = None,
        client: Callable[..., Engine] = EngineClient,
        fronts: Fronts | None = None,
        attached: int | None = None,
    ) -> None:
        """
        Args:
            client: makes a client of an engine.
            fronts: the others that use the engines of this one.
            attached: the number of this front where it uses the engines of another.
        """
        self.config = config
        self.fronts = fronts
        self._directory = directory
        self._certificate = certificate
        self._number = attached or 0
        self.metrics = Metrics(config.metrics_names)
        self._make_engine = partial(self._engine, client, progress)
        self.keepers: list[Keeper] = []  # of all engines, in the order of models and of their replicas
        self.slots = [self._slot(number, model) for number, model in enumerate(models)]
        self.metrics.phases = lambda: [
            (slot.name, engine, {phase.value: phase is status.phase for phase in Phase})
            for slot in self.slots
            for engine, status in enumerate(slot.statuses)
        ]
        self._readings: dict[int, tuple[Stamp, asyncio.Task[Reading]]] = {}  # by model: the last one begun
        self.served = [ServedModel(slot) for slot in self.slots]
        self.app = create_app(config, self.served, guard=guard, metrics=self.metrics)
        self.state: ServerState = self.app.state.anycore
        self._importing: asyncio.Future[None] | None = None  # of what reads tokenizers
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._second_signal = 0

    def signalled(self, number: int) -> None:
        """Take a signal: the first one drains, the second ends everything at once."""
        if self._stop.is_set():
            log.warning("second signal: stopping at once")
            self._second_signal = number
            self._now.set()
        self._stop.set()

    @property
    def clients(self) -> list[Engine]:
        """The engine of each keeper that has one."""
        return [engine for keeper in self.keepers if (engine := keeper.engine or keeper.next) is not None]

    def _slot(self, number: int, model: ModelConfig) -> Slot:
        """Make what holds a model: one keeper an engine, or the way to another server."""
        if model.url is not None:
            from anycore.server.remote import Remote  # needs a package that nothing else does

            tally = Tally(self._directory / f"remote-{number}", self._number, self.config.api_servers)
            return Remote(model, self.metrics.observer(model.names[0]), self.config.step_timeout, tally)
        parts = parts_of(model)
        keepers = [self._keeper(number, engine, part) for engine, part in enumerate(parts)]
        return keepers[0] if len(keepers) == 1 else Replicas(model, keepers)

    def _keeper(self, number: int, engine: int, model: ModelConfig) -> Keeper:
        observer = self.metrics.observer(model.names[0], lambda: self.state.plugins, engine)
        place = len(self.keepers)
        first = self._number == 0
        keeper = Keeper(
            model,
            partial(self._make_engine, observer, place),
            partial(self._read, number),
            restarts=self.config.engine_restarts if first else None,
            restarted=partial(self._restarted, observer, place) if first else lambda reason: None,
            gave_up=partial(self._lost, place),
            shared=self.config.api_servers > 1,
        )
        self.keepers.append(keeper)
        return keeper

    def _engine(
        self,
        client: Callable[..., Engine],
        progress: Callable[[str, float], None] | None,
        observer: ModelMetrics,
        place: int,
        model: ModelConfig,
        at_least: dict[str, int],
    ) -> Engine:
        """Make a model's next engine."""
        return client(
            model,
            self._directory,
            observer,
            log_level=self.config.log_level,
            log_format=self.config.log_format,
            log_prompts=self.config.log_prompts,
            strict=self.config.strict,
            progress=progress,
            step_timeout=self.config.step_timeout,
            at_least=at_least,
            **({} if self.config.api_servers == 1 else {"place": place, "front": self._number}),
        )

    def _restarted(self, observer: ModelMetrics, place: int, reason: str) -> None:
        observer.engine_restarted(reason)
        self._lost(place)

    def _lost(self, place: int) -> None:
        """Let the other fronts know that an engine is gone."""
        if self.fronts is not None:
            self.fronts.lost(place)

    async def run(self, listener: socket.socket, late: Callable[[], None] | None = None) -> int:
        """Serve on an open socket until stopped; return the exit code.

        Args:
            late: called when all is ready; until then nothing is answered.

        Raises:
            AnycoreError: a model cannot be served.
        """
        crowd.watch(asyncio.get_running_loop())
        http = HttpServer(
            self.app,
            self._certificate,
            read_timeout=self.config.read_timeout,
            write_timeout=self.config.write_timeout,
        )
        loading = asyncio.create_task(self._bring_up(listener))
        serving = asyncio.create_task(self._answer(http, listener, late, loading))
        deaths = [slot.dead for slot in self.slots] + ([self.fronts.dead] if self.fronts else [])
        ends = [asyncio.create_task(event.wait()) for event in (self._stop, *deaths)]
        try:
            await asyncio.wait([loading, serving, ends[0]], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # a model that cannot be served ends the server with its reason
                await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
            await self._drain(http)
        finally:
            http.should_exit = True
            http.force_exit = self._now.is_set()
            for task in (loading, *ends):
                task.cancel()
            died = [failure.exit_code for slot in self.slots if (failure := slot.failure) is not None]
            if self.fronts is not None:
                await self.fronts.stop(self._now.is_set())
            await asyncio.gather(serving, *(slot.stop() for slot in self.slots), return_exceptions=True)
        if self.fronts is not None and self.fronts.dead.is_set():
            died.append(1)
        return died[0] if died else 128 + self._second_signal if self._second_signal else 0

    async def _answer(
        self, http: HttpServer, listener: socket.socket, late: Callable[[], None] | None, loading: asyncio.Task[None]
    ) -> None:
        if late is not None:
            await asyncio.wait([loading])
            listener.listen(BACKLOG)
            late()
        await http.serve(sockets=[listener])

    async def _bring_up(self, listener: socket.socket) -> None:
        """Plan every model, and only when all can be served let them load.

        Raises:
            AnycoreError: one cannot; no weights are read.
        """
        if self.fronts is not None:
            await self.fronts.start()
        plans = asyncio.gather(*(slot.plan() for slot in self.slots))
        plans.add_done_callback(lambda done: done.cancelled() or done.exception())  # a stop may come before it is asked
        here = [Path(slot.config.model) for slot in self.slots if slot.config.url is None]
        folders = [path for path in here if path.is_dir()]  # of others it is known where they lie once they are planned
        self._importing = asyncio.ensure_future(aside(import_reader_for, folders))  # beside what the engines import
        self.state.plugins = await aside(plugins.load)
        check_tools(self.config.run_tools, self.state.plugins)
        await plans
        attached = [] if self.fronts is None else [self.fronts.attach(self._front_boot(listener))]
        await asyncio.gather(*(slot.load() for slot in self.slots), *attached)
        log.info("ready: %s", ", ".join(name for model in self.served for name in model.names))

    async def _read(self, number: int, slot: Slot, plan: wire.Planned) -> Callable[[], None]:
        """Read tokenizer and templates of a model while its engine loads; put them into use when told. What has not
        changed since is not read again.

        Replicas that load at the same time share one reading.
        """
        served, stamp = self.served[number], stamp_of(slot.config, plan)
        if served.stamp == stamp:
            return lambda: None
        assert self.state.plugins is not None
        begun = self._readings.get(number)
        if begun is None or begun[0] != stamp or begun[1].done():
            work = aside(read, slot.config, plan, self.state.plugins, self.config.allow_request_template)
            begun = self._readings[number] = stamp, asyncio.ensure_future(work)
        reading = await asyncio.shield(begun[1])

        def adopt() -> None:
            served.reading, served.stamp = reading, stamp

        return adopt

    def _front_boot(self, listener: socket.socket) -> FrontBoot:
        return FrontBoot(
            number=0,
            config=self.config,
            host=self.config.host,
            port=listener.getsockname()[1],
            directory=str(self._directory),
            models=[slot.config for slot in self.slots],
            planned=[keeper.planned for keeper in self.keepers],
            engines=[client.address for client in self.clients if isinstance(client, EngineClient)],
        )

    async def _hand_over(self, http: HttpServer, seconds: float) -> None:
        """Leave new connections to whoever shares the port, and answer all that came before, as if nothing were."""
        log.info("leaving the port to others; %d connections have %g s", len(http.server_state.connections), seconds)
        end = asyncio.get_running_loop().time() + seconds
        await http.retire()
        while http.busy and asyncio.get_running_loop().time() < end and not self._now.is_set():
            await asyncio.sleep(POLL_SECONDS)

    async def _drain(self, http: HttpServer) -> None:
        """Take nothing new; let what runs finish until the limit, then end it with an error."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        dead = [place for place, keeper in enumerate(self.keepers) if keeper.dead.is_set()]
        died = any(slot.dead.is_set() for slot in self.slots)
        limit = DEAD_SECONDS if died else self.config.shutdown_timeout
        if self.config.reuse_port and http.started and not died:
            if self.fronts is not None:
                self.fronts.drain(dead)
            await self._hand_over(http, limit)
        self.state.draining = True
        if self.fronts is not None:
            self.fronts.drain(dead)
        for slot in self.slots:
            slot.drain()
        log.info("stopping: %d requests have %g s to finish", sum(slot.live for slot in self.slots), limit)
        while loop.time() - began < limit and not self._now.is_set():
            busy = any(slot.live for slot in self.slots) or (self.fronts is not None and self.fronts.running)
            if not died and not busy:
                break
            await asyncio.sleep(POLL_SECONDS)
        for slot in self.slots:
            slot.fail_all(Unavailable("the server stopped before this request was done", code="shutting_down"))
            if self._now.is_set():
                slot.kill()
