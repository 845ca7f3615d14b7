"""The life of one server: engines up, HTTP from the start, drain, down. `run.serve` makes it and hands it signals."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from anycore import plugins
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import Unavailable
from anycore.models.spec import Architecture
from anycore.server import wire
from anycore.server.app import create_app
from anycore.server.aside import aside
from anycore.server.auth import Guard
from anycore.server.bridge import EngineClient
from anycore.server.fronts import FrontBoot, Fronts
from anycore.server.http import HttpServer
from anycore.server.metrics import Metrics
from anycore.server.port import BACKLOG
from anycore.server.state import ServedModel, ServerState

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
        progress: Callable[[str, float], None] | None = None,
        client: Callable[..., EngineClient] = EngineClient,
        fronts: Fronts | None = None,
    ) -> None:
        self.config = config
        self.fronts = fronts
        self._directory = directory
        marked = {} if fronts is None else {"front": 0}
        self.metrics = Metrics()
        self.clients = [
            client(
                model,
                directory,
                self.metrics.observer(model.names[0], lambda: self.state.plugins),
                log_level=config.log_level,
                strict=config.strict,
                progress=progress,
                **marked,
            )
            for model in models
        ]
        self.served = [ServedModel(client.config, client) for client in self.clients]
        self.app = create_app(config, self.served, guard=guard, metrics=self.metrics)
        self.state: ServerState = self.app.state.anycore
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

    async def run(self, listener: socket.socket, late: Callable[[], None] | None = None) -> int:
        """Serve on an open socket until stopped; return the exit code.

        Args:
            late: called when all is ready; until then nothing is answered.

        Raises:
            AnycoreError: a model cannot be served.
        """
        http = HttpServer(self.app)
        loading = asyncio.create_task(self._bring_up(listener))
        serving = asyncio.create_task(self._answer(http, listener, late, loading))
        deaths = [client.dead for client in self.clients] + ([self.fronts.dead] if self.fronts else [])
        ends = [asyncio.create_task(event.wait()) for event in (self._stop, *deaths)]
        try:
            await asyncio.wait([loading, serving, ends[0]], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()  # a model that cannot be served ends the server with its reason
                await asyncio.wait([serving, *ends], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            http.should_exit = True
            http.force_exit = self._now.is_set()
            for task in (loading, *ends):
                task.cancel()
            if self.fronts is not None:
                await self.fronts.stop(self._now.is_set())
            await asyncio.gather(serving, *(client.stop() for client in self.clients), return_exceptions=True)
        died = [client.failure.exit_code for client in self.clients if client.failure is not None]
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
        await asyncio.gather(*(client.start() for client in self.clients))
        found = self.state.plugins = await aside(plugins.load)
        planned = await asyncio.gather(*(client.planned for client in self.clients))
        for client in self.clients:
            client.load()
        attached = [] if self.fronts is None else [self.fronts.attach(self._front_boot(listener, planned))]
        read = self._read(planned, found.architectures())
        await asyncio.gather(read, *attached, *(client.ready for client in self.clients))
        if self.fronts is not None:
            for client in self.clients:
                client.forget_paths()
        log.info("ready: %s", ", ".join(name for model in self.served for name in model.names))

    async def _read(self, planned: list[wire.Planned], architectures: Sequence[Architecture]) -> None:
        """Read tokenizers and templates while the engines load."""
        template = self.config.allow_request_template
        for model, plan in zip(self.served, planned, strict=True):
            await aside(model.read, plan, architectures, template)

    def _front_boot(self, listener: socket.socket, planned: list[wire.Planned]) -> FrontBoot:
        return FrontBoot(
            number=0,
            config=self.config,
            host=self.config.host,
            port=listener.getsockname()[1],
            directory=str(self._directory),
            models=[client.config for client in self.clients],
            planned=planned,
            engines=[client.address for client in self.clients],
        )

    async def _drain(self) -> None:
        """Take nothing new; let what runs finish until the limit, then end it with an error."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        died = any(client.dead.is_set() for client in self.clients)
        limit = DEAD_SECONDS if died else self.config.shutdown_timeout
        self.state.draining = True
        if self.fronts is not None:
            self.fronts.drain(died)
        for client in self.clients:
            client.drain()
        log.info("stopping: %d requests have %g s to finish", sum(client.live for client in self.clients), limit)
        while loop.time() - began < limit and not self._now.is_set():
            busy = any(client.live for client in self.clients) or (self.fronts is not None and self.fronts.running)
            if not died and not busy:
                break
            await asyncio.sleep(POLL_SECONDS)
        for client in self.clients:
            client.fail_all(Unavailable("the server stopped before this request was done", code="shutting_down"))
            if self._now.is_set():
                client.kill()
