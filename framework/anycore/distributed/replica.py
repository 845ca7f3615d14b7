"""One engine of a model, as an actor that Ray Serve starts and watches: a keeper with its engine process beside it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

from anycore.config import ModelConfig, ServerConfig
from anycore.distributed.pieces import Met, Piece, decode_request, encode
from anycore.distributed.ranks import Ranks
from anycore.engine.request import NewRequest, RequestRecord
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError, Unavailable
from anycore.server import logs, wire
from anycore.server.bridge import EngineClient
from anycore.server.keeper import Keeper
from anycore.server.run import private_directory
from anycore.server.slot import Slot
from anycore.server.stream import Stream

log = logging.getLogger(__name__)


class Nobody:
    """An observer: requests are counted by the fronts."""

    def begin(self, card: dict[str, Any], stats: Callable[[], Stats]) -> None: ...
    def token_after(self, seconds: float) -> None: ...
    def refused(self, code: str | None) -> None: ...
    def engine_restarted(self, reason: str) -> None: ...
    def finished(self, record: RequestRecord, request: NewRequest) -> None: ...


class EngineReplica:
    """Answers requests of fronts with the deltas of its engine."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: ServerConfig, model: ModelConfig, resources: dict[str, float]
    ) -> None:
        """
        Args:
            model: settings of one engine.
            resources: of one rank, where there are several.

        Raises:
            RuntimeError: the model cannot be served; Ray shows the sentence.
        """
        from ray import serve

        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._config = config
        logs.of_server(config, (), model.names[0])
        self._directory = private_directory()
        self._streams: dict[str, Stream] = {}
        self._ranks = Ranks(model.tensor_parallel_size, resources)
        self._ranks.start()
        alone = model.tensor_parallel_size == 1  # a group ends as a whole, its processes on other nodes included
        self._keeper = Keeper(model, self._make, _nothing_more, restarts=config.engine_restarts if alone else 0)
        try:
            await self._keeper.plan()
            await self._keeper.load()
        except AnycoreError as error:
            await self._end()
            raise RuntimeError(f"{model.names[0]} cannot be served: {error.message}") from None

    def _make(self, model: ModelConfig, at_least: dict[str, int]) -> EngineClient:
        return EngineClient(
            model,
            self._directory,
            Nobody(),
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            log_prompts=self._config.log_prompts,
            strict=self._config.strict,
            step_timeout=self._config.step_timeout,
            at_least=at_least,
        )

    async def meet(self) -> bytes:
        """Say what is served here, as `Met`."""
        return encode(Met(self._keeper.planned, self._keeper.card))

    @property
    def _stats(self) -> Stats:
        engine = self._keeper.engine
        return Stats() if engine is None else engine.stats

    async def generate(self, data: bytes, hashes: list[bytes]) -> AsyncIterator[bytes]:
        """Answer a request, a `NewRequest`, with pieces. Leaving early ends it in the engine.

        Args:
            hashes: of the prompt's blocks; they are for the router.
        """
        request = decode_request(data)
        yield encode(Piece(self._name))
        try:
            async with self._keeper.submit(request) as stream:
                self._streams[request.id] = stream
                async for delta in stream:
                    yield encode(Piece(deltas=[delta]))
            yield encode(Piece(stats=self._stats))
        except AnycoreError as error:
            yield encode(Piece(refused=refusal_of(request.id, error)))
        finally:
            self._streams.pop(request.id, None)

    async def stop(self, request: str, replica: str, index: int) -> None:
        """End one sequence of a request: its front has found a stop string."""
        stream = self._streams.get(request)
        if stream is not None:
            stream.stop(index)

    async def check_health(self) -> None:
        """Called by Ray, which replaces this replica when it raises."""
        if self._keeper.dead.is_set():
            failure = self._keeper.failure
            raise RuntimeError(f"the engine is lost: {'' if failure is None else failure.message}")

    async def __del__(self) -> None:
        await self._end()

    async def _end(self) -> None:
        if hasattr(self, "_keeper"):
            self._keeper.fail_all(
                Unavailable("this engine was ended before the request was done", code="shutting_down")
            )
            await self._keeper.stop()
        self._ranks.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _nothing_more(slot: Slot, planned: wire.Planned) -> Callable[[], None]:
    return lambda: None  # tokenizers are the fronts'


def refusal_of(request: str, error: AnycoreError) -> wire.Refusal:
    """What makes the same exception again in the front."""
    after = getattr(error, "retry_after", 1)
    return wire.Refusal(request, error.message, error.code, error.param, type(error).__name__, after)
