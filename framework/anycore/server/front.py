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
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from anycore.server import aside, child, logs, wire
from anycore.server.auth import Guard, read_keys
from anycore.server.bridge import EngineClient
from anycore.server.fronts import READY, FrontBoot
from anycore.server.ledger import LEDGER, Ledger
from anycore.server.lifecycle import Server
from anycore.server.phases import Phase
from anycore.server.port import listen
from anycore.server.reload import Reload
from anycore.server.tls import Certificate, certificate_of


class AttachedClient(EngineClient):
    """A client of an engine that another process started and will end."""

    _places = count()

    def __init__(self, *arguments: Any, boot: FrontBoot, engine_died: threading.Event, **options: Any) -> None:
        super().__init__(*arguments, front=boot.number, **options)
        place = next(self._places)
        self._planned = boot.planned[place]
        self._engine_died = engine_died
        own = f"ipc://{boot.directory}/{place}-out-{boot.number}"
        self._boot = msgspec.structs.replace(self._boot, commands=boot.engines[place], reports=own)

    async def _spawn(self, boot: wire.Boot) -> Elsewhere:
        self.planned.set_result(self._planned)
        self.card = self._planned.card
        self._send(wire.Attach(self.front, boot.reports))
        return Elsewhere(self._engine_died)

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

    def kill(self) -> None:
        self._stopping = True


class Elsewhere:
    """What EngineClient needs of a process: its end, of which the first front tells."""

    def __init__(self, died: threading.Event) -> None:
        self._died = died

    async def wait(self) -> int:
        while not self._died.is_set():
            await asyncio.sleep(0.05)
        return 1

    def send_signal(self, signal: int) -> None:
        raise NotImplementedError("the engine belongs to the first front")

    def kill(self) -> None:
        raise NotImplementedError("the engine belongs to the first front")


def listen_to_parent(engine_died: threading.Event) -> None:
    """End with the parent; hear of an engine's end."""

    def watch() -> None:
        while os.read(0, 4096):
            engine_died.set()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


async def serve(boot: FrontBoot, guard: Guard, certificate: Certificate | None) -> int:
    engine_died = threading.Event()
    listen_to_parent(engine_died)
    client = partial(AttachedClient, boot=boot, engine_died=engine_died)
    server = Server(boot.config, boot.models, guard, Path(boot.directory), certificate=certificate, client=client)
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
    logs.of_server(boot.config, secrets, label=f"front {boot.number}")
    ledger = Ledger(Path(boot.directory) / LEDGER, boot.number, boot.config.api_servers)
    return asyncio.run(serve(boot, Guard(keys, ledger), certificate_of(boot.config)))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    if aside.busy():
        os._exit(code)
    sys.exit(code)
