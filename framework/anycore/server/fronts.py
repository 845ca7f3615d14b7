"""Further front processes on the same port, as seen from the first one, which alone starts engines and takes signals.

A front is `python -m anycore.server.front`. It is started with the server, told what to serve once the engines are up,
and answers for its own requests. When one ends unasked, the server ends.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import suppress

import msgspec

from anycore.config import ModelConfig, ServerConfig
from anycore.server import wire
from anycore.server.bridge import ending

READY = b"ready\n"
LAST_SECONDS = 2.0  # that a front gets to close its connections once its requests have ended

log = logging.getLogger(__name__)


class FrontBoot(msgspec.Struct, kw_only=True):
    """The first line a front reads. Each line after it is the place of an engine that has died, and which may
    soon have another one at the same address; the end means that we have died."""

    number: int
    config: ServerConfig
    host: str
    port: int
    directory: str
    models: list[ModelConfig]
    planned: list[wire.Planned]  # of each engine: a model has one for each of its replicas
    engines: list[str]  # where each engine takes commands


class Fronts:
    """All fronts but the first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.dead = asyncio.Event()  # one ended and nobody had asked it to
        self._processes: list[asyncio.subprocess.Process] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._attached = self._reload_due = False

    async def start(self) -> None:
        """Start the processes: their imports take as long as an engine does."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "anycore.server.front")
        for _ in range(self.count):
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
            self._processes.append(process)
            self._watchers.append(asyncio.create_task(self._watch(process)))

    async def attach(self, boot: FrontBoot) -> None:
        """Tell every front what to serve, and wait until each listens or has ended."""
        for number, process in enumerate(self._processes, 1):
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(msgspec.structs.replace(boot, number=number)) + b"\n")
        for process in self._processes:
            assert process.stdout is not None
            if await process.stdout.readline() == READY:
                continue
            await self.dead.wait()
            return
        self._attached = True
        if self._reload_due:
            self.reload()
        log.info("%d fronts share the port", self.count + 1)

    def reload(self) -> None:
        """Let them read keys and certificate again; not before they listen to this signal."""
        self._reload_due = not self._attached
        if self._attached:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGHUP)

    def lost(self, place: int) -> None:
        """Tell that the engine of a model has died."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(b"%d\n" % place)

    def drain(self, dead: list[int]) -> None:
        """Let them take nothing new and end when their requests have; `dead` engines answer nothing any more."""
        self._stopping = True
        for place in dead:
            self.lost(place)
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    @property
    def running(self) -> bool:
        return not all(watcher.done() for watcher in self._watchers)

    async def stop(self, at_once: bool) -> None:
        """End what still runs."""
        self._stopping = True
        if self._watchers and not at_once:
            await asyncio.wait(self._watchers, timeout=LAST_SECONDS)
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._watchers)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._stopping:
            log.error("a front ended: %s", ending(code))
            self.dead.set()
