"""The front's end of an engine process: starts it, feeds it, watches it. The only front-side file that knows processes.

`EngineClient.submit` returns a `Stream` of the deltas of one request; leaving it early drops the request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from anycore.config import ModelConfig
from anycore.engine.pace import Pace
from anycore.engine.request import NewRequest
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError, BadRequest, ConfigError, Overloaded, Unavailable
from anycore.server import spares, wire
from anycore.server.logs import log_crash
from anycore.server.phases import Phase
from anycore.server.spares import Spares
from anycore.server.stream import Observer, Stream, error_of

LAST_WORDS_SECONDS = 0.1  # between a process's end and the end of reading what it had sent
STOP_SECONDS = 1.0  # what a stopped engine gets before it is killed
WATCH_SECONDS = 1.0  # between two looks at how long an engine has been silent; shorter where the limit is
SHOWN_REQUESTS = 8  # in the log line about a stalled step

log = logging.getLogger(__name__)


class Child(Protocol):
    """What the client needs of a process; `asyncio.subprocess.Process` has it."""

    async def wait(self) -> int: ...
    def send_signal(self, signal: int) -> None: ...
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
        log_format: str = "text",
        log_prompts: bool = False,
        strict: bool = False,
        command: tuple[str, ...] = spares.COMMAND,
        progress: Callable[[str, float], None] | None = None,
        front: int | None = None,
        place: int = 0,
        step_timeout: float = 0.0,
        at_least: dict[str, int] | None = None,
        waiting: Spares | None = None,
    ) -> None:
        """
        Args:
            front: this process's number where several fronts share the engine.
            place: of the model among others; fronts find its engine by that.
            step_timeout: seconds of silence at work after which it is taken for stuck and killed; 0 for never.
            at_least: numbers of the card that must be reached; with less it gives up before it reads weights.
            waiting: processes of which one is taken, whatever `command` is.
        """
        self.config = config
        self.name = config.names[0]
        self.observer = observer
        self._enter(Phase.STARTING)
        self.activity = ""  # what it is doing while loading
        self.fraction = 0.0  # of that activity, 0..1
        self.failure: AnycoreError | None = None  # why it is dead
        self.card: dict[str, Any] = {}
        self.stats = Stats()
        self.heard = self.since  # when it last said something; while it works it does so after every step
        self.dead = asyncio.Event()
        self.front = front or 0
        self._mark = "" if front is None else f"{front}:"  # before ids on their way: says whose they are
        self._command = command
        self._spares = waiting
        self._progress = progress
        self._step_timeout = step_timeout
        number = next(self._numbers)
        name = f"{number}-in" if front is None else f"{place}-shared"  # one after the other at the same address
        self._boot = wire.Boot(
            config=config,
            commands=f"ipc://{directory}/{name}",
            reports=f"ipc://{directory}/{number}-out",
            directory=str(directory),
            log_level=log_level,
            log_format=log_format,
            log_prompts=log_prompts,
            strict=strict,
            at_least=at_least or {},
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Commands leave by a plain socket: with no limit on its queue, sending never waits.
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        self._outbox: list[wire.Command] = []
        self._streams: dict[str, Stream] = {}
        self._places = math.inf  # requests that can run or wait in it, once it has said so
        self._pace = Pace()
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
        own_folder(Path(self._boot.directory))
        self._reports.bind(self._boot.reports)
        self._commands.connect(self._boot.commands)
        self._child = await self._spawn(self._boot)
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())
        self._pulse = asyncio.create_task(self._watch_pulse())

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, time.monotonic()

    def load(self) -> None:
        """Let it read the weights."""
        self._enter(Phase.LOADING)
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
            for task in (self._reader, self._pulse):
                task.cancel()
            await asyncio.gather(self._reader, self._pulse, return_exceptions=True)
            self.forget_paths()
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
        """Start the engine process, or take one that has been started for it, and send it its settings."""
        process = await (self._spares.take() if self._spares is not None else spares.start(self._command))
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

    async def _watch_pulse(self) -> None:
        """Kill the engine when a step takes longer than it may."""
        limit = self._step_timeout
        while limit and not self.dead.is_set():
            if not self._stalled():
                await asyncio.sleep(min(WATCH_SECONDS, limit / 4))
                continue
            await asyncio.sleep(WATCH_SECONDS)  # if it was this process that stood still, what was said is read now
            if self._stalled() and self._child is not None:
                log.error("%s: no step has ended for %.0f s (--step-timeout %g): %s", self.name, *self._silence())
                log.error("%s: where it stands, if it can still say so, and then its end:", self.name)
                with suppress(ProcessLookupError):
                    self._child.send_signal(signal.SIGUSR1)
                await asyncio.sleep(LAST_WORDS_SECONDS)
                self._die(Unavailable(f"no step of the engine has ended for {limit:g} s", code="step_stalled"))
                self._child.kill()

    def _stalled(self) -> bool:
        """Whether it has been silent for too long, with work to do."""
        busy = self._streams or self.stats.running or self.stats.waiting
        return bool(busy) and self.phase is Phase.READY and time.monotonic() - self.heard > self._step_timeout

    def _silence(self) -> tuple[float, float, str]:
        """How long, against which limit, and what was being done: nothing of a prompt."""
        running = [stream.summary for stream in self._streams.values()]
        left_out = f" and {len(running) - SHOWN_REQUESTS} more" if len(running) > SHOWN_REQUESTS else ""
        what = "; ".join(running[:SHOWN_REQUESTS]) + left_out
        counts = f"step {self.stats.steps + 1}, {self.stats.running} running, {self.stats.waiting} waiting"
        return time.monotonic() - self.heard, self._step_timeout, f"{counts}: {what}"

    def _die(self, failure: AnycoreError) -> None:
        """End everything that waits for this engine. The first reason given is the one that stays."""
        if self.dead.is_set():
            return
        if not self._stopping:
            self.failure = failure
        if self.phase is Phase.READY and not self._stopping:  # before that, `ready` raises it to whoever starts up
            log.error("%s: %s", self.name, failure.message)
        self._enter(Phase.DEAD)
        code = failure.code if failure.code == "step_stalled" else "engine_dead"
        self.fail_all(Unavailable("the model's engine has ended; this request was not completed", code=code))
        self.stats = msgspec.structs.replace(self.stats, running=0, waiting=0, blocks_free=self.stats.blocks)
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
            Overloaded: as many requests as can run and wait are there. It would refuse this one, but only after a step.
        """
        if self._refusing:
            raise Unavailable("the server is shutting down and takes no new requests", code="shutting_down")
        if self.phase is not Phase.READY:
            raise Unavailable(f"the model is not ready: {self.phase.value}", code=f"model_{self.phase.value}")
        if self._mark + request.id in self._streams:
            raise BadRequest(f"request id {request.id!r} is in use", param="request_id")
        if len(self._streams) >= self._places:
            self.observer.refused(Overloaded.code)
            max_queued = self.config.max_queued
            raise self._pace.refusal(len(self._streams) - int(self._places) + max_queued, max_queued)
        if not self._streams:
            self.heard = time.monotonic()  # it was silent because it had nothing to do
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
                self.heard = time.monotonic()
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
            seats = report.card.get("max_num_seqs")  # unknown of engines that hold no plan
            self._places = seats + self.config.max_queued if seats else math.inf
            self._enter(Phase.READY)
            self.activity, self.fraction = "", 1.0
            self.observer.begin(self.card, lambda: self.stats)
            if not self._mark:
                self.forget_paths()
            self.ready.set_result(None)
        else:
            failure = error_of(report.message, report.code, report.param)
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
            self._enter(Phase.WARMING)

    def _handle_output(self, output: wire.Output) -> None:
        if output.stats is not None:
            self.stats = output.stats
        for request_id in output.admitted:
            if request_id in self._streams:
                self._streams[request_id].admit()
        for refusal in output.refused:
            if refusal.id in self._streams:
                error = error_of(refusal.message, refusal.code, refusal.param, refusal.kind, refusal.retry_after)
                self._streams[refusal.id].fail(error)
        ended = 0
        for delta in output.deltas:
            ended += delta.finish is not None
            if delta.id in self._streams:
                self._streams[delta.id].take(delta)
        self._pace.step(time.monotonic(), ended, bool(self._streams))


def own_folder(folder: Path) -> None:
    """Make the sockets' folder again if it is gone; refuse one that somebody else has put in its place."""
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is not this user's own: the engine's sockets cannot lie there")


def ending(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")
