"""The front's end of a model's engines on the cluster: what `bridge.EngineClient` is of one process.

To the slot that holds it this is one engine that never dies: which of many answers a request is the router's choice,
and how many there are Ray Serve's. A request whose engine is lost before it said anything is sent to another one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from anycore.config import ModelConfig
from anycore.distributed.loads import loads_of
from anycore.distributed.pieces import Met, decode_met, decode_piece, encode
from anycore.engine.request import NewRequest
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError, BadRequest, DeadlineExceeded, Overloaded, Unavailable
from anycore.server import wire
from anycore.server.logs import log_crash
from anycore.server.phases import Phase
from anycore.server.routing import chain
from anycore.server.stream import Observer, Stream, error_of

ATTEMPTS = 4  # engines that a request which was not answered is sent to
AGAIN_SECONDS = 1.0

log = logging.getLogger(__name__)


class ClusterClient:
    """All engines of one model, seen from the event loop of a front."""

    def __init__(self, config: ModelConfig, observer: Observer, handle: Any, deployment: str) -> None:
        """
        Args:
            handle: of the engines' deployment.
            deployment: its name.
        """
        self.config = config
        self.name = config.names[0]
        self.observer = observer
        self.phase = Phase.STARTING
        self.since = time.monotonic()
        self.activity = "waiting for the cluster"
        self.fraction = 0.0
        self.failure: AnycoreError | None = None
        self.card: dict[str, Any] = {}
        self.stats = Stats()  # what runs is known to the router: see `total`
        self.heard = self.since
        self.dead = asyncio.Event()
        self._handle = handle
        self._deployment = deployment
        self._streams: dict[str, Stream] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._replicas: dict[str, str] = {}  # by request: who answers it
        self._refusing = False

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to ask for an engine."""
        loop = asyncio.get_running_loop()
        self.planned: asyncio.Future[wire.Planned] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self._meeting = asyncio.create_task(self._meet())

    async def _meet(self) -> None:
        """Wait for the first engine; Ray starts it, and says why if it does not."""
        while True:
            try:
                met = decode_met(await self._handle.meet.remote())
                break
            except Exception as error:
                log.info("%s: no engine yet (%s)", self.name, type(error).__name__)
                await asyncio.sleep(AGAIN_SECONDS)
        self._met: Met = met
        self.card = met.planned.card
        self.planned.set_result(met.planned)

    def load(self) -> None:
        """It is loaded: engines are met when they are ready."""
        self.card = self._met.card
        self._enter(Phase.READY)
        self.activity, self.fraction = "", 1.0
        self.observer.begin(self.card, self.total)
        self.ready.set_result(None)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, time.monotonic()

    def total(self) -> Stats:
        """Of all engines together, as far as they have reported."""
        return loads_of(self._deployment).total()

    def drain(self) -> None:
        self._refusing = True

    async def stop(self) -> None:
        self._refusing = True
        self._enter(Phase.DEAD)
        tasks = [self._meeting, *self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Nothing to kill: engines are Ray's."""

    def forget_paths(self) -> None:
        """There are none."""

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        return len(self._streams)

    def submit(self, request: NewRequest) -> Stream:
        """Send a request to an engine.

        Raises:
            Unavailable: there is none yet, or the server stops.
        """
        if self._refusing:
            raise Unavailable("the server is shutting down and takes no new requests", code="shutting_down")
        if self.phase is not Phase.READY:
            raise Unavailable(f"the model is not ready: {self.phase.value}", code=f"model_{self.phase.value}")
        if request.id in self._streams:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        stream = self._streams[request.id] = Stream(self, request)
        self._work[request.id] = asyncio.create_task(self._carry(stream))
        return stream

    async def _carry(self, stream: Stream) -> None:
        """Bring a request to an engine and its deltas back, unless `forget` ends this."""
        request = stream.request
        alarm = None
        if request.deadline is not None:  # while it waits here, no engine looks at its time
            alarm = asyncio.get_running_loop().call_later(request.deadline, self._late, stream)
        try:
            data, hashes = encode(request), self._blocks(request)
            for attempt in range(ATTEMPTS):
                if await self._try(stream, data, hashes, attempt + 1 == ATTEMPTS):
                    break
        except AnycoreError as error:
            stream.fail(error)
        except Exception as error:
            log_crash(log, f"{self.name}: a request could not be carried", error)
            stream.fail(Unavailable("the request did not get to an engine of the cluster", code="engine_dead"))
        finally:
            if alarm is not None:
                alarm.cancel()
            self._work.pop(request.id, None)
            self._replicas.pop(request.id, None)

    async def _try(self, stream: Stream, data: bytes, hashes: list[bytes], last: bool) -> bool:
        """Let an engine answer a request; return whether that is all there is to it.

        Raises:
            AnycoreError: as the engine says; or it was lost in the middle, or is the last one that is tried.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError

        request, loads = stream.request, loads_of(self._deployment)
        answered = False
        response = self._handle.options(stream=True).generate.remote(data, hashes)
        try:
            async for said in response:
                piece = decode_piece(said)
                self.heard = time.monotonic()
                if piece.stats is not None:
                    loads.report(self._replicas.get(request.id, ""), piece.stats)
                elif piece.replica:
                    self._replicas[request.id] = piece.replica
                elif piece.refused is not None:
                    lost = piece.refused
                    raise error_of(lost.message, lost.code, lost.param, lost.kind, lost.retry_after)
                for delta in piece.deltas:
                    if not answered:
                        stream.admit()
                    answered = True
                    stream.take(delta)
            if request.id not in self._streams:
                return True
            what = "ended without a last word"
        except BackPressureError:
            raise Overloaded(f"too many requests wait for model {self.name!r} (--max-queued)") from None
        except RayError as error:
            what = type(error).__name__
        finally:
            response.cancel()
        log.warning("%s: the engine of %s is lost (%s)", self.name, stream.summary, what)
        if answered or last:
            raise Unavailable("the model's engine has ended; this request was not completed", code="engine_dead")
        return False

    def _late(self, stream: Stream) -> None:
        if stream.request.id in self._streams and stream.request.id not in self._replicas:
            stream.fail(
                DeadlineExceeded(f"no engine took this request within {stream.request.deadline:g} s"), abort=True
            )

    def _blocks(self, request: NewRequest) -> list[bytes]:
        if not self.card.get("prefix_caching") or not self.card.get("block_size"):
            return []
        return chain(request.token_ids, self.card["block_size"], request.cache_salt)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Let the engine forget a request, or one sequence of it."""
        work, replica = self._work.get(request_id), self._replicas.get(request_id)
        if index is None:
            if work is not None:
                work.cancel()
        elif replica is not None:
            self._handle.stop.remote(request_id, replica, index)

    def forget(self, stream: Stream) -> None:
        """Stop routing deltas to a stream that has ended."""
        self._streams.pop(stream.request.id, None)

    def fail_all(self, error: AnycoreError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error, abort=True)
