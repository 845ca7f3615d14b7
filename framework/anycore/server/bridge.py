"""The front's end of an engine process: starts it, feeds it, watches it. The only front-side file that knows processes.

`EngineClient.submit` returns a `Stream` of the deltas of one request; leaving it early drops the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from anycore.config import ModelConfig
from anycore.engine.request import Delta, FinishReason, NewRequest, RequestRecord, Stats
from anycore.errors import (
    AnycoreError,
    BadRequest,
    ContextLengthExceeded,
    DeadlineExceeded,
    NonFiniteOutput,
    Overloaded,
    TaskNotSupported,
    Unavailable,
)
from anycore.server import wire

COMMAND = (sys.executable, "-m", "anycore.server.child")
LAST_WORDS_SECONDS = 0.1  # between a process's end and the end of reading what it had sent
STOP_SECONDS = 1.0  # what a stopped engine gets before it is killed

log = logging.getLogger(__name__)


class Phase(str, Enum):
    """How far an engine is."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEAD = "dead"


class Observer(Protocol):
    """Who is told about an engine and its requests: metrics and plugins."""

    def begin(self, card: dict[str, Any], stats: Callable[[], Stats]) -> None: ...  # it is ready
    def tokens(self, seconds: float | None) -> None: ...  # a delta with tokens; seconds since the one before
    def refused(self, code: str | None) -> None: ...
    def finished(self, record: RequestRecord, request: NewRequest) -> None: ...


class Child(Protocol):
    """What the client needs of a process; `asyncio.subprocess.Process` has it."""

    async def wait(self) -> int: ...
    def kill(self) -> None: ...


class Stream:
    """The deltas of one request, in order, until every sequence has finished.

    Use it as `async with client.submit(request) as stream`, then `async for delta in stream`. An error of the engine
    is raised as the AnycoreError whose envelope the client should see.
    """

    def __init__(self, client: EngineClient, request: NewRequest) -> None:
        self.request = request
        self._client = client
        self._arrived = asyncio.Event()
        self._deltas: deque[Delta] = deque()
        self._error: AnycoreError | None = None
        self._admitted = False
        self._open = set(range(request.sampling.n if request.sampling else 1))
        self._submitted = time.monotonic()
        self._first = self._last = 0.0
        self._queued = 0.0
        self._cached = self._generated = 0
        self._recorded = False

    async def admitted(self) -> None:
        """Wait until the engine has taken the request.

        Raises:
            AnycoreError: it was refused; Overloaded when the queue is full.
        """
        while not (self._admitted or self._deltas or self._error):
            await self._wait()
        if self._error and not self._admitted:
            raise self._error

    def stop(self, index: int = 0) -> None:
        """End one sequence here (a stop string was found); when it was the last, the engine drops the request."""
        self._open.discard(index)
        self._deltas = deque(delta for delta in self._deltas if delta.index != index)
        if not self._open and not self._recorded:
            self._client.abort(self.request.id)
            self._record(FinishReason.STOP)
        self._arrived.set()

    def close(self) -> None:
        """End the request if it has not ended: nothing of it stays in the engine."""
        if not self._recorded:
            self._client.abort(self.request.id)
            self._record(FinishReason.ABORT)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error:
                raise self._error
            if not self._open or self._recorded:
                raise StopAsyncIteration
            await self._wait()
        return self._deltas.popleft()

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    # --- what the client calls ----------------------------------------------------------------------------------

    def admit(self) -> None:
        self._admitted = True
        self._arrived.set()

    def take(self, delta: Delta) -> None:
        """Accept a delta that came from the engine."""
        if delta.index not in self._open:
            return  # stopped here, while the engine had one more token under way
        if delta.error is not None:
            self.fail(error_of(delta.error, delta.error_code), abort=len(self._open) > 1)
            return
        now = time.monotonic()
        if delta.token_ids or delta.finish:
            self._queued = self._queued or delta.queue_seconds
            self._cached = max(self._cached, delta.cached_tokens)
            self._generated += len(delta.token_ids)
            self._client.observer.tokens(now - self._last if self._last else None)
            self._first = self._first or now
            self._last = now
        self._deltas.append(delta)
        if delta.finish:
            self._open.discard(delta.index)
            if not self._open:
                self._record(delta.finish)
        self._arrived.set()

    def fail(self, error: AnycoreError, *, abort: bool = False) -> None:
        """End the request with an error, after the deltas that have arrived."""
        self._error = error
        if abort:
            self._client.abort(self.request.id)
        if self._admitted:
            self._record(FinishReason.ERROR)
        else:
            self._recorded = True
            self._client.forget(self)
            self._client.observer.refused(error.code)
        self._arrived.set()

    def _record(self, finish: FinishReason) -> None:
        if self._recorded:
            return
        self._recorded = True
        self._client.forget(self)
        request, now = self.request, time.monotonic()
        record = RequestRecord(
            id=request.id,
            model=self._client.config.names[0],
            task=request.task,
            prompt_tokens=len(request.token_ids),
            cached_tokens=self._cached,
            output_tokens=self._generated,
            sequences=request.sampling.n if request.sampling else 1,
            finish=finish.value,
            queue_seconds=self._queued,
            first_token_seconds=self._first - self._submitted if self._first else None,
            total_seconds=now - self._submitted,
        )
        self._client.observer.finished(record, request)


class EngineClient:
    """One model's engine process, seen from the event loop of the front."""

    _numbers = count()

    def __init__(
        self,
        config: ModelConfig,
        directory: Path,
        observer: Observer,
        *,
        log_level: str = "info",
        strict: bool = False,
        command: tuple[str, ...] = COMMAND,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.config = config
        self.observer = observer
        self.phase = Phase.STARTING
        self.activity = ""  # what it is doing while loading
        self.fraction = 0.0  # of that activity, 0..1
        self.failure: AnycoreError | None = None  # why it is dead
        self.card: dict[str, Any] = {}
        self.stats = Stats()
        self.dead = asyncio.Event()
        self._command = command
        self._progress = progress
        number = next(self._numbers)
        self._boot = wire.Boot(
            config=config,
            commands=f"ipc://{directory}/{number}-in",
            reports=f"ipc://{directory}/{number}-out",
            directory=str(directory),
            log_level=log_level,
            strict=strict,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox: list[wire.Command] = []
        self._streams: dict[str, Stream] = {}
        self._child: Child | None = None
        self._refusing = False  # draining: nothing new
        self._stopping = False  # its end is wanted

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and begin to listen to it. Returns at once; wait for `planned`, `ready` or `dead`."""
        loop = asyncio.get_running_loop()
        self.planned: asyncio.Future[wire.Planned] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        for future in (self.planned, self.ready):
            future.add_done_callback(lambda f: f.cancelled() or f.exception())  # nobody has to wait for them
        # Commands leave by a plain socket: with no limit on its queue, sending never waits.
        self._reports = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._commands = self._context.socket(zmq.PUSH)
        self._reports.set_hwm(0)
        self._commands.set_hwm(0)
        self._commands.linger = 0
        self._reports.bind(self._boot.reports)
        self._commands.connect(self._boot.commands)
        self._child = await self._spawn(self._boot)
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    def load(self) -> None:
        """Let it read the weights."""
        self.phase = Phase.LOADING
        self._send(wire.Load())

    def drain(self) -> None:
        """Refuse what has not run yet and what comes; what runs goes on."""
        self._refusing = True
        if self.phase is Phase.READY:
            self._send(wire.Drain())

    async def stop(self) -> None:
        """End the process: politely when it turns its loop, else by SIGKILL."""
        if self._child is None:
            return
        self._stopping = True
        if self.phase is Phase.READY:
            self._send(wire.Stop())
            await asyncio.wait([self._watcher], timeout=STOP_SECONDS)
        if not self._watcher.done():
            self.kill()
        await self._watcher
        self._reports.close()
        self._commands.close()
        self._context.term()

    def kill(self) -> None:
        """End the process at once."""
        self._stopping = True
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.kill()

    async def _spawn(self, boot: wire.Boot) -> Child:
        """Start the engine process, in a session of its own so that Ctrl-C does not reach it.

        The settings go through its standard input: nothing secret in `ps`, and the end of the pipe tells it that this
        process is gone.
        """
        environment = {k: v for k, v in os.environ.items() if k != "ANYCORE_API_KEY"}
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True, env=environment
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(boot) + b"\n")
        return process

    async def _watch(self) -> None:
        """Wait for the end of the process; whatever is still open ends with it."""
        assert self._child is not None
        code = await self._child.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        self._reader.cancel()
        self._die(Unavailable(f"the engine ended: {ending(code)}", code="engine_dead"))

    def _die(self, failure: AnycoreError) -> None:
        """End everything that waits for this engine. The first reason given is the one that stays."""
        if self.dead.is_set():
            return
        if not self._stopping:
            self.failure = failure
        if self.phase is Phase.READY and not self._stopping:  # before that, `ready` raises it to whoever starts up
            log.error("%s: %s", self.config.names[0], failure.message)
        self.phase = Phase.DEAD
        self.fail_all(Unavailable("the model's engine has ended; this request was not completed", code="engine_dead"))
        for future in (self.planned, self.ready):
            if not future.done():
                future.set_exception(failure)
        self.dead.set()

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(self, request: NewRequest) -> Stream:
        """Send a request to the engine.

        Raises:
            Unavailable: the engine is not ready, or gone.
        """
        if self._refusing:
            raise Unavailable("the server is shutting down and takes no new requests", code="shutting_down")
        if self.phase is not Phase.READY:
            raise Unavailable(f"the model is not ready: {self.phase.value}", code=f"model_{self.phase.value}")
        if request.id in self._streams:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        stream = self._streams[request.id] = Stream(self, request)
        self._send(wire.Submit(request))
        return stream

    def abort(self, request_id: str) -> None:
        """Let the engine forget a request."""
        if self.phase is Phase.READY:
            self._send(wire.Abort(request_id))

    def forget(self, stream: Stream) -> None:
        """Stop routing deltas to a stream that has ended."""
        self._streams.pop(stream.request.id, None)

    def fail_all(self, error: AnycoreError) -> None:
        """End every live request with an error."""
        for stream in list(self._streams.values()):
            stream.fail(error, abort=True)

    # --- messages -----------------------------------------------------------------------------------------------

    def _send(self, command: wire.Command) -> None:
        """Queue a command; those of one turn of the event loop leave as one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        if not self._commands.closed:
            self._commands.send(wire.encode(commands), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            self._handle(wire.decode_report(await self._reports.recv()))

    def _handle(self, report: wire.Report) -> None:
        if isinstance(report, wire.Output):
            self._handle_output(report)
        elif isinstance(report, wire.Progress):
            self._show(report)
        elif isinstance(report, wire.Planned):
            self.card = report.card
            self.planned.set_result(report)
        elif isinstance(report, wire.Ready):
            self.card, self.stats = report.card, report.stats
            self.phase, self.activity, self.fraction = Phase.READY, "", 1.0
            self.observer.begin(self.card, lambda: self.stats)
            self.ready.set_result(None)
        else:
            failure = AnycoreError(report.message, param=report.param, code=report.code)
            failure.exit_code = report.exit_code
            self._die(failure)

    def _show(self, report: wire.Progress) -> None:
        if self._progress is not None:
            self._progress(f"{self.config.names[0]}: {report.name}", report.fraction)
        elif report.name != self.activity:
            log.info("%s: %s", self.config.names[0], report.name)
        self.activity, self.fraction = report.name, report.fraction
        if self.phase is Phase.LOADING and report.name.startswith("warm"):
            self.phase = Phase.WARMING

    def _handle_output(self, output: wire.Output) -> None:
        if output.stats is not None:
            self.stats = output.stats
        for request_id in output.admitted:
            if request_id in self._streams:
                self._streams[request_id].admit()
        for refusal in output.refused:
            if refusal.id in self._streams:
                self._streams[refusal.id].fail(error_of(refusal.message, refusal.code, refusal.param))
        for delta in output.deltas:
            if delta.id in self._streams:
                self._streams[delta.id].take(delta)


_ERRORS: dict[str | None, type[AnycoreError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        ContextLengthExceeded,
        DeadlineExceeded,
        NonFiniteOutput,
        Overloaded,
        TaskNotSupported,
        Unavailable,
    )
}
_ERRORS["shutting_down"] = Unavailable


def error_of(message: str, code: str | None, param: str | None = None) -> AnycoreError:
    """Make the exception again that the engine process reported by its code."""
    return _ERRORS.get(code, AnycoreError)(message, param=param, code=code)


def ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")
