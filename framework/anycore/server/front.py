"""One further front process: `python -m anycore.server.front`, started and told what to serve by `fronts.Fronts`.

It is a whole server but for the engines, which belong to the first front: it attaches to each as one more client, and
listens on the same port as soon as it can answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from anycore.server import aside, child, logs, wire
from anycore.server.auth import Guard, read_keys
from anycore.server.beforehand import remote_keys
from anycore.server.bridge import EngineClient
from anycore.server.fronts import READY, FrontBoot
from anycore.server.ledger import LEDGER, Ledger
from anycore.server.lifecycle import Server
from anycore.server.phases import Phase
from anycore.server.port import listen
from anycore.server.reload import Reload
from anycore.server.tls import Certificate, certificate_of


class Deaths:
    """How many engines of each place have died, as the first front tells."""

    def __init__(self, places: int) -> None:
        self.counts = [0] * places

    def listen(self) -> None:
        """Count what comes on standard input; end with the parent."""

        def watch() -> None:
            for line in os.fdopen(0, "rb"):
                self.counts[int(line)] += 1
            os._exit(1)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class AttachedClient(EngineClient):
    """A client of an engine that another process started and will end."""

    def __init__(self, *arguments: Any, boot: FrontBoot, deaths: Deaths, place: int, **options: Any) -> None:
        options["step_timeout"] = 0.0  # the first front watches
        super().__init__(*arguments, place=place, **options)
        self._planned = boot.planned[place]
        self._elsewhere = Elsewhere(deaths, place)
        own = f"{self._boot.reports}-{boot.number}"
        self._boot = msgspec.structs.replace(self._boot, commands=boot.engines[place], reports=own)

    async def _spawn(self, boot: wire.Boot) -> Elsewhere:
        self.planned.set_result(self._planned)
        self.card = self._planned.card
        self._send(wire.Attach(self.front, boot.reports))
        return self._elsewhere

    def load(self) -> None:
        if self.phase is Phase.STARTING:  # else it has said already that it is ready
            self._enter(Phase.LOADING)

    def forget_paths(self) -> None:
        Path(self._boot.reports.removeprefix("ipc://")).unlink(missing_ok=True)

    async def stop(self) -> None:
        self._stopping = True
        self._reader.cancel()
        self._watcher.cancel()
        self._pulse.cancel()
        await asyncio.gather(self._reader, self._watcher, self._pulse, return_exceptions=True)
        self._reports.close()
        self._commands.close()
        self._context.term()
        self.forget_paths()

    def kill(self) -> None:
        self._stopping = True


class Elsewhere:
    """What EngineClient needs of a process: its end, of which the first front tells."""

    def __init__(self, deaths: Deaths, place: int) -> None:
        self._deaths = deaths
        self._place = place
        self._before = deaths.counts[place]

    async def wait(self) -> int:
        while self._deaths.counts[self._place] == self._before:
            await asyncio.sleep(0.05)
        return 1

    def send_signal(self, signal: int) -> None:
        raise NotImplementedError("the engine belongs to the first front")

    def kill(self) -> None:
        raise NotImplementedError("the engine belongs to the first front")


async def serve(boot: FrontBoot, guard: Guard, certificate: Certificate | None) -> int:
    deaths = Deaths(len(boot.planned))
    deaths.listen()
    client = partial(AttachedClient, boot=boot, deaths=deaths)
    server = Server(
        boot.config,
        boot.models,
        guard,
        Path(boot.directory),
        certificate=certificate,
        client=client,
        attached=boot.number,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.signalled, signal.SIGTERM)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Reload(boot.config, guard, certificate))

    def ready() -> None:
        sys.stdout.buffer.write(READY)
        sys.stdout.flush()

    with listen(boot.host, boot.port, shared=True, begin=False) as listener:
        return await server.run(listener, late=ready)


def main() -> int:
    line = child.read_line()
    boot = msgspec.json.decode(line, type=FrontBoot)
    keys, secrets = read_keys(boot.config)
    secrets = [*secrets, *remote_keys(boot.models)]
    logs.of_server(boot.config, secrets, label=f"front {boot.number}")
    ledger = Ledger(Path(boot.directory) / LEDGER, boot.number, boot.config.api_servers)
    return asyncio.run(serve(boot, Guard(keys, ledger), certificate_of(boot.config)))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    if aside.busy():
        os._exit(code)
    sys.exit(code)
