"""A front on the cluster: this server's own application, behind Ray Serve's HTTP proxies instead of a socket."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from anycore.config import ModelConfig, ServerConfig
from anycore.distributed.client import ClusterClient
from anycore.errors import AnycoreError, Unavailable, Unsupported
from anycore.server import logs
from anycore.server.auth import Guard
from anycore.server.keeper import Keeper
from anycore.server.keys import Key
from anycore.server.lifecycle import Server
from anycore.server.run import private_directory
from anycore.server.slot import Slot

POLL_SECONDS = 0.05


class Held(Keeper):
    """The slot of a model whose engines are Ray's."""

    async def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise Unsupported(
            f"model {self.name!r} runs on a cluster: change its settings and deploy it again (anycore serve --ray)"
        )


class FrontServer(Server):
    """A server whose engines are behind handles, one of each model, and which does not listen itself."""

    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ModelConfig],
        guard: Guard,
        directory: Path,
        handles: Sequence[Any],
        deployments: Sequence[str],
    ) -> None:
        self._handles = handles
        self._deployments = deployments
        super().__init__(config, models, guard, directory)

    def _slot(self, number: int, model: ModelConfig) -> Slot:
        observer = self.metrics.observer(model.names[0], lambda: self.state.plugins)
        handle, deployment = self._handles[number], self._deployments[number]
        keeper = Held(
            model,
            lambda config, at_least: ClusterClient(config, observer, handle, deployment),
            partial(self._read, number),
        )
        self.keepers.append(keeper)
        return keeper

    async def bring_up(self) -> None:
        """Get ready for requests, as soon as engines are. Raises AnycoreError."""
        with socket.socket() as unused:
            await self._bring_up(unused)

    async def take_down(self) -> None:
        """Let what runs finish until the limit, then end it with an error."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.shutdown_timeout
        self.state.draining = True
        for slot in self.slots:
            slot.drain()
        while any(slot.live for slot in self.slots) and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        for slot in self.slots:
            slot.fail_all(Unavailable("the server stopped before this request was done", code="shutting_down"))
        await asyncio.gather(*(slot.stop() for slot in self.slots), return_exceptions=True)


class Front:
    """The actor: `FrontServer` as Ray Serve's ingress."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        config: ServerConfig,
        models: Sequence[ModelConfig],
        keys: list[Key],
        deployments: Sequence[str],
        *handles: Any,
    ) -> None:
        logs.of_server(config, ())
        self._directory = private_directory()
        self._server = FrontServer(config, models, Guard(keys), self._directory, handles, deployments)
        self._up = asyncio.create_task(self._server.bring_up())

    def __serve_build_asgi_app__(self) -> Any:
        return self._server.app

    async def check_health(self) -> None:
        """Called by Ray, which replaces this replica when it raises."""
        if self._up.done() and not self._up.cancelled() and (error := self._up.exception()) is not None:
            raise RuntimeError(error.message if isinstance(error, AnycoreError) else repr(error))

    async def __del__(self) -> None:
        self._up.cancel()
        await self._server.take_down()
        shutil.rmtree(self._directory, ignore_errors=True)
