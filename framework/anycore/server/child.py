"""The engine process of one model, started by `ahead` and fed by `bridge.EngineClient`.

It plans, waits for the word to load, loads, and then turns the loop: commands in, one engine step, one report out.
It exits when told, when the engine fails, and at once when its parent is gone.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from anycore.engine.request import Delta, NewRequest
from anycore.engine.stats import Stats
from anycore.errors import AnycoreError
from anycore.server import logs, wire

PAUSE = 0.05  # seconds without any command, after which nobody is likely to wait
LINGER_MS = 2000  # how long last words may take to leave
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the loop needs of `engine.engine.Engine`."""

    def add(self, new: NewRequest) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def drain(self) -> list[str]: ...
    def step(self) -> list[Delta]: ...
    def has_work(self) -> bool: ...
    def use_pause(self) -> bool: ...
    def stats(self) -> Stats: ...


Progress = Callable[[str, float], None]

Build = Callable[[Progress], "tuple[Engine, dict[str, Any]]"]
"""Progress -> the engine, ready to run, and its card."""

Launch = Callable[[wire.Boot, Progress], "tuple[wire.Planned, Build]"]
"""Settings -> what will be served, and how to build it. No weights are read before `Build` is called."""


class Link:
    """The engine process's end of the two sockets. Sending never blocks; the front may be as slow as it likes."""

    def __init__(self, boot: wire.Boot) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._reports = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._reports):
            socket.set_hwm(0)
            socket.linger = LINGER_MS
        self._commands.bind(boot.commands)
        self._reports.connect(boot.reports)
        self._fronts = {0: self._reports}  # of several fronts, each hears of its own requests
        self._shown: tuple[str, int] | None = None

    def receive(self, wait: bool, seconds: float | None = None) -> list[wire.Command]:
        """Return the commands that have arrived; with `wait`, block until there is one, or for so many seconds."""
        commands: list[wire.Command] = []
        if wait and seconds is not None:
            wait = bool(self._commands.poll(round(1e3 * seconds)))
        while True:
            try:
                commands += wire.decode_commands(self._commands.recv(0 if wait and not commands else zmq.NOBLOCK))
            except zmq.Again:
                return commands

    def send(self, report: wire.Report) -> None:
        self._reports.send(wire.encode(report))

    def attach(self, command: wire.Attach, ready: wire.Ready) -> None:
        """Let a further front hear of its requests."""
        socket = self._fronts[command.front] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.linger = LINGER_MS
        socket.connect(command.reports)
        socket.send(wire.encode(ready))

    def share(self, output: wire.Output) -> None:
        """Send every front its part of what a turn brought."""
        if len(self._fronts) == 1:
            self.send(output)
            return
        parts = {front: wire.Output(stats=output.stats) for front in self._fronts}
        for delta in output.deltas:
            parts[front_of(delta.id)].deltas.append(delta)
        for request_id in output.admitted:
            parts[front_of(request_id)].admitted.append(request_id)
        for refusal in output.refused:
            parts[front_of(refusal.id)].refused.append(refusal)
        for front, part in parts.items():
            self._fronts[front].send(wire.encode(part))

    def progress(self, name: str, fraction: float) -> None:
        """Report progress in whole percents."""
        shown = (name, int(100 * fraction))
        if shown != self._shown:
            self._shown = shown
            self.send(wire.Progress(name, min(max(fraction, 0.0), 1.0)))

    def close(self) -> None:
        self._commands.close()
        for socket in self._fronts.values():
            socket.close()
        self._context.term()


def front_of(request_id: str) -> int:
    return int(request_id.partition(":")[0])


def run(boot: wire.Boot, launch: Launch) -> int:
    """Serve one model until told to stop; return the exit code."""
    link = Link(boot)
    try:
        planned, build = launch(boot, link.progress)
        link.send(planned)
        early = link.receive(wait=True)
        if any(isinstance(command, wire.Stop) for command in early):
            return 0
        engine, card = build(link.progress)
        link.send(wire.Ready(card, engine.stats()))
        turn(engine, link, card, early)
        return 0
    except AnycoreError as error:
        log.debug("giving up", exc_info=error)
        link.send(wire.Failed(error.message, error.param, error.code, error.exit_code))
        return error.exit_code
    except Exception as error:
        logs.log_crash(log, "the engine failed", error)
        link.send(wire.Failed(f"the engine failed ({type(error).__name__}); the log above says where"))
        return 1
    finally:
        link.close()


def turn(engine: Engine, link: Link, card: dict[str, Any], early: list[wire.Command]) -> None:
    """Take commands and step while there is work; sleep while there is none. `early` ones came before the engine."""
    while True:
        output = wire.Output()
        commands, early = early or following(engine, link), []
        for command in commands:
            if isinstance(command, wire.Stop):
                return
            if isinstance(command, wire.Attach):
                link.attach(command, wire.Ready(card, engine.stats()))
            else:
                obey(engine, command, output)
        if engine.has_work():
            output.deltas = engine.step()
        output.stats = engine.stats()
        link.share(output)


def following(engine: Engine, link: Link) -> list[wire.Command]:
    """The next commands. An engine without work waits for them, and uses the time."""
    if engine.has_work():
        return link.receive(wait=False)
    commands = link.receive(wait=True, seconds=PAUSE)
    while not commands and engine.use_pause():
        commands = link.receive(wait=False)
    return commands or link.receive(wait=True)


def obey(engine: Engine, command: wire.Command, output: wire.Output) -> None:
    """Carry out one command; what it says about requests goes into `output`."""
    if isinstance(command, wire.Submit):
        try:
            engine.add(command.request)
            output.admitted.append(command.request.id)
        except AnycoreError as error:
            kind, after = type(error).__name__, getattr(error, "retry_after", 1)
            refusal = wire.Refusal(command.request.id, error.message, error.code, error.param, kind, after)
            output.refused.append(refusal)
    elif isinstance(command, wire.Abort):
        engine.abort(command.id, command.index)
    elif isinstance(command, wire.Drain):
        for request_id in engine.drain():
            message = "the server is shutting down; this request had not started"
            output.refused.append(wire.Refusal(request_id, message, "shutting_down", kind="Unavailable"))


def die_with_parent(directory: str) -> None:
    """Make sure that this process ends when its parent does, even by SIGKILL: its standard input then ends too."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    if sys.platform == "linux":  # also where native code never lets the thread run
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_line() -> bytes:
    """Read the settings, one line of JSON, and nothing beyond it. Without any the process ends."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            if stat.S_ISCHR(os.fstat(0).st_mode):  # else whoever would have sent them has ended, and said why
                print("no settings on standard input: this program is started by `anycore serve`", file=sys.stderr)
            os._exit(1)  # Python's own exit would wait for imports
        line += byte
    return bytes(line)


def main(launch: Launch) -> int:
    """Entry of the process. The front alone decides when it ends: Ctrl-C and a service manager's SIGTERM do not."""
    boot = msgspec.json.decode(read_line(), type=wire.Boot)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)  # says where every thread stands, also out of native code
    die_with_parent(boot.directory)
    logs.configure(boot.log_level, label=boot.config.names[0], style=boot.log_format, loud=boot.log_prompts)
    return run(boot, launch)


def launch_model(boot: wire.Boot, progress: Progress) -> tuple[wire.Planned, Build]:
    """Plan the real engine."""
    from anycore import plugins  # heavy imports start here, once the parent is watched
    from anycore.engine.grammar import Grammars
    from anycore.engine.launch import prepare
    from anycore.engine.searches import Texts
    from anycore.ranks.leader import Home, open_model
    from anycore.text.grammar import vocabulary_of
    from anycore.text.tokenizer import Tokenizer

    prepared = prepare(boot.config, plugins.load(), strict=boot.strict, progress=progress)
    source = prepared.source
    planned = wire.Planned(prepared.card(), source.name, str(source.folder), str(source.gguf) if source.gguf else None)

    def build_engine(progress: Progress) -> tuple[Engine, dict[str, Any]]:
        importlib.import_module("torch")
        gc.freeze()  # what has been imported stays: looking for garbage among it takes a tenth of a second each time
        engine = open_model(prepared, progress, boot.at_least, Home(own=True, log_level=boot.log_level))
        engine.grammars = Grammars(lambda: vocabulary_of(source, prepared.spec))
        engine.texts = Texts(lambda: Tokenizer.from_source(source))
        return engine, engine.card

    return planned, build_engine
