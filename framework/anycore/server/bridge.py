"""The front's end of an engine process: starts it, feeds it, watches it. The only front-side file that knows processes.

`EngineClient.submit` returns a `Stream` of the deltas of one request; leaving it early drops the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from anycore.config import ModelConfig
from anycore.engine.request import NewRequest, Stats
from anycore.errors import AnycoreError, BadRequest, Unavailable
from anycore.server import wire
from anycore.server.logs import log_crash
from anycore.server.stream import Observer, Stream, error_of

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


class Child(Protocol):
    """What the client needs of a process; `asyncio.subprocess.Process` has it."""

    async def wait(self) -> int: ...
    def kill(self) -> None: ...


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
        front: int | None = None,
    ) -> None:
        """`front` is this process's number where several fronts share the engine."""
        self.config = config
        self.name = config.names[0]
        self.observer = observer
        self.phase = Phase.STARTING
        self.activity = ""  # what it is doing while loading
        self.fraction = 0.0  # of that activity, 0..1
        self.failure: AnycoreError | None = None  # why it is dead
        self.card: dict[str, Any] = {}
        self.stats = Stats()
        self.dead = asyncio.Event()
        self.front = front or 0
        self._mark = "" if front is None else f"{front}:"  # before ids on their way: says whose they are
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
        # Commands leave by a plain socket: with no limit on its queue, sending never waits.
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
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
        self._stopping = True
        if self._child is not None:
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
        # Threads of numeric libraries that spin at barriers lose nearly all their speed beside another busy process.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
            log.error("%s: %s", self.name, failure.message)
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
        if self._mark + request.id in self._streams:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        stream = self._streams[self._mark + request.id] = Stream(self, request)
        self._send(wire.Submit(msgspec.structs.replace(request, id=self._mark + request.id)))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Let the engine forget a request, or one sequence of it."""
        if self.phase is Phase.READY:
            self._send(wire.Abort(self._mark + request_id, index))

    def forget(self, stream: Stream) -> None:
        """Stop routing deltas to a stream that has ended."""
        self._streams.pop(self._mark + stream.request.id, None)

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
        """Take what the engine process says, for as long as it lives."""
        try:
            while True:
                self._handle(wire.decode_report(await self._reports.recv()))
        except Exception as error:  # without its reports the engine is lost to us
            log_crash(log, f"{self.name}: a report of the engine cannot be read", error)
            self._die(Unavailable("the engine's reports cannot be read", code="engine_dead"))
            self.kill()

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
            if not self._mark:
                self.forget_paths()
            self.ready.set_result(None)
        else:
            failure = AnycoreError(report.message, param=report.param, code=report.code)
            failure.exit_code = report.exit_code
            self._die(failure)

    @property
    def address(self) -> str:
        """Where the engine takes commands."""
        return self._boot.commands

    def forget_paths(self) -> None:
        """Remove the socket files, once all are connected: a killed server leaves nothing behind."""
        for address in (self._boot.commands, self._boot.reports):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        with suppress(OSError):  # another engine's are still there
            Path(self._boot.directory).rmdir()

    def _show(self, report: wire.Progress) -> None:
        if self._progress is not None:
            self._progress(f"{self.name}: {report.name}", report.fraction)
        elif report.name != self.activity:
            log.info("%s: %s", self.name, report.name)
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
                self._streams[refusal.id].fail(error_of(refusal.message, refusal.code, refusal.param, refusal.kind))
        for delta in output.deltas:
            if delta.id in self._streams:
                self._streams[delta.id].take(delta)


def ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")
