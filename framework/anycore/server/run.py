"""`anycore serve`: bind the port, start the engines, serve, drain, stop.

The port is bound first and answers from then on. Every model is planned before the weights of any are read. The first
SIGTERM or SIGINT drains, the second ends everything at once. When an engine dies, `/health` and `/ready` turn 503
within two seconds, and the server ends with a non-zero code `lifecycle.DEAD_SECONDS` later at most.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from anycore.config import ModelConfig, ServerConfig, flag
from anycore.errors import ConfigError
from anycore.server import aside, crowd, logs
from anycore.server.auth import Guard
from anycore.server.beforehand import check
from anycore.server.keys import Key
from anycore.server.ledger import LEDGER, Ledger
from anycore.server.port import listen, url_of
from anycore.server.reload import Reload
from anycore.server.spares import Spares
from anycore.server.tls import Certificate

if TYPE_CHECKING:
    from anycore.server.bridge import EngineClient

SOCKET_PATH = 100  # bytes that every system allows for the path of a local socket, its name included


def serve(
    config: ServerConfig,
    models: Sequence[ModelConfig],
    *,
    progress: Callable[[str, float], None] | None = None,
    client: Callable[..., EngineClient] | None = None,
) -> int:
    """Serve until stopped; return the exit code: 0 after a drain, that of an engine that died, 128 + a second signal.

    Args:
        progress: told "model: activity" and how far it is, 0 to 1; without it, activities are logged.
        client: makes the front's end of each engine; without it, that of an engine process.

    Raises:
        AnycoreError: the server cannot be started as asked; `exit_code` fits.
    """
    keys, secrets, certificate = check(config, models)
    logs.of_server(config, secrets)
    crowd.make_room()
    listener = open_port(config)
    with listener:
        code = asyncio.run(_serve(config, models, keys, certificate, listener, progress, client))
    leave_if_busy(code)
    return code


def open_port(config: ServerConfig) -> socket.socket:
    """Listen, alone on the port; where several fronts will share it, first make sure that nobody else is there.

    Under --reuse-port somebody may be: the port is bound, and listened to when there is something to answer with.
    """
    if (config.api_servers > 1 or config.reuse_port) and not hasattr(socket, "SO_REUSEPORT"):
        option = "reuse_port" if config.reuse_port else "api_servers"
        raise ConfigError(f"{flag(option)} needs a system whose processes can share a port", param=option)
    if config.reuse_port:
        return listen(config.host, config.port, shared=True, begin=False)
    listener = listen(config.host, config.port)
    if config.api_servers == 1:
        return listener
    port = listener.getsockname()[1]
    listener.close()
    return listen(config.host, port, shared=True)


def leave_if_busy(code: int) -> None:
    """End the process here if a thread is still in the middle of an import, for which Python's own exit would wait."""
    if aside.busy():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


async def _serve(
    config: ServerConfig,
    models: Sequence[ModelConfig],
    keys: list[Key],
    certificate: Certificate | None,
    listener: socket.socket,
    progress: Callable[[str, float], None] | None,
    client: Callable[..., EngineClient] | None,
) -> int:
    directory, waiting, several = private_directory(), Spares(), config.api_servers > 1
    try:
        if client is None:
            await waiting.start(sum(len(model.placement) for model in models if model.url is None))
        if several:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared_metrics(directory))  # read when it is imported
        guard = Guard(keys, Ledger(directory / LEDGER, 0, config.api_servers) if several else None)
        gc.disable()  # imports leave no garbage
        try:
            from anycore.server.bridge import EngineClient  # heavy imports start here, beside those of the engines
            from anycore.server.fronts import Fronts
            from anycore.server.lifecycle import Server
        finally:
            gc.freeze()  # what has been imported stays: requests do not wait until it has been looked through again
            gc.enable()

        client = client or partial(EngineClient, waiting=waiting)
        fronts = Fronts(config.api_servers - 1) if several else None
        server = Server(
            config, models, guard, directory, certificate=certificate, progress=progress, client=client, fronts=fronts
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.signalled, number)
        reload = Reload(config, guard, certificate, fronts.reload if fronts else lambda: None)
        if reload.is_needed:
            loop.add_signal_handler(signal.SIGHUP, reload)
        url = url_of(listener, certificate is not None)
        print(f"anycore: {url} serves {', '.join(model.names[0] for model in models)}", flush=True)
        return await server.run(listener, late=_listening if config.reuse_port else None)
    finally:
        await waiting.end()
        shutil.rmtree(directory, ignore_errors=True)


def _listening() -> None:
    logging.getLogger(__name__).info("listening now, beside whoever else does on this port")


def shared_metrics(directory: Path) -> Path:
    """Make the folder in which all fronts count, so that any of them can tell the sums."""
    folder = directory / "metrics"
    folder.mkdir()
    return folder


def private_directory() -> Path:
    """Make a directory that only this user can enter, with a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="anycore-"))
    if len(bytes(directory)) + len("/9999-front-99") > SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="anycore-", dir="/tmp"))
    return directory
