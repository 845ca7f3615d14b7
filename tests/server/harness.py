"""Servers for tests: `serve_process` is what users start; `serve_here` is the same server in a thread of the test.

Both listen on a free port and are ready when the block begins. Engines run in real processes with `serve_process`; with
`serve_here` they are threads, which start fast and can be looked into.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from anycore.config import ModelConfig, ServerConfig
from anycore.server import child, wire
from anycore.server.auth import Guard
from anycore.server.bridge import EngineClient
from anycore.server.keys import plain
from anycore.server.lifecycle import Server
from anycore.server.port import listen, url_of
from anycore.server.tls import certificate_of

START_SECONDS = 60.0
NO_CERTIFICATES = httpx.create_ssl_context(verify=False)
"""Made once: one a request would take longer than the request."""
SCRIPTED = Path(__file__).parent / "serve_scripted.py"


_patience = (-math.inf, 0.0)  # when it was measured, and what it was


def patience() -> float:
    """What limits in seconds are multiplied by: ten, for a machine may be slow or become busy; more if it is very busy.

    Measured anew after a second.
    """
    global _patience
    if time.monotonic() > _patience[0] + 1:
        _patience = (time.monotonic(), measured_patience())
    return _patience[1]


def measured_patience() -> float:
    """A short burst of work gets its turn at once even on a busy machine, so the load average counts, too."""
    wall, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu < 0.02:
        pass
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return max(10.0, (time.monotonic() - wall) / 0.02, 2 * waiting)


@dataclass
class Live:
    """A running server."""

    url: str
    server: Server | None = None  # serve_here only
    loop: asyncio.AbstractEventLoop | None = None  # serve_here only
    process: subprocess.Popen[str] | None = None  # serve_process only
    output: list[str] = field(default_factory=list)  # lines of stdout and stderr so far; serve_process only
    outcome: list[int | BaseException] = field(default_factory=list)  # exit code or exception; serve_here only

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=NO_CERTIFICATES, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=30, verify=NO_CERTIFICATES, **options)

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        self.wait(lambda: self.get("/ready").status_code == 200, seconds)

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Poll until the condition holds; errors of the connection count as no."""
        end = time.monotonic() + seconds * patience()
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                if condition():
                    return
            if self.process is not None and self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s; output:\n" + "".join(self.output))

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
        elif self.server is not None and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.server.signalled, number)

    def exit_code(self, seconds: float = 10) -> int:
        """Wait for the end of the process."""
        assert self.process is not None
        return self.process.wait(seconds * patience())

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        assert self.process is not None
        found = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        pairs = [tuple(map(int, line.split())) for line in found]
        return [pid for pid, parent in pairs if parent == self.process.pid]


@contextmanager
def serve_process(*arguments: str, ready: bool = True, env: dict[str, str] | None = None) -> Iterator[Live]:
    """Run `anycore serve` with these arguments on a free port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "anycore.cli.main", "serve", *arguments, "--port", "0"]
    with _process(command, ready, env) as live:
        yield live


@contextmanager
def serve_scripted(
    folder: Path, *words: str, ready: bool = True, env: dict[str, str] | None = None, **settings: Any
) -> Iterator[Live]:
    """Run a real server over a scripted engine (fake_child.Script); `settings` are ServerConfig's."""
    options = [f"{name}={value}" for name, value in settings.items()]
    with _process([sys.executable, str(SCRIPTED), str(folder), *options, "--", *words], ready, env) as live:
        yield live


@contextmanager
def _process(command: list[str], ready: bool, env: dict[str, str] | None) -> Iterator[Live]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    live = Live("", process=process)
    reader = threading.Thread(target=_read, args=(process, live), daemon=True)
    reader.start()
    try:
        live.wait(lambda: bool(live.url), START_SECONDS)
        if ready:
            live.wait_ready()
        yield live
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(10)


def _read(process: subprocess.Popen[str], live: Live) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        live.output.append(line)
        if line.startswith("anycore: http"):
            live.url = line.split()[1]


class ThreadClient(EngineClient):
    """An engine in a thread of this process, behind the same sockets and messages."""

    def __init__(self, *arguments: Any, launch: child.Launch = child.launch_model, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._launch = launch

    async def _spawn(self, boot: wire.Boot) -> _Thread:
        return _Thread(boot, self._launch)


class _Thread:
    """What the client needs of a process. A thread cannot be killed: it is left behind."""

    def __init__(self, boot: wire.Boot, launch: child.Launch) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._run, args=(boot, launch), daemon=True).start()

    def _run(self, boot: wire.Boot, launch: child.Launch) -> None:
        code = child.run(boot, launch)
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signal: int) -> None:
        """Nothing to tell a thread."""

    def kill(self) -> None:
        self._end(-9)


@contextmanager
def serve_here(
    *models: ModelConfig,
    keys: tuple[str, ...] = (),
    guard: Guard | None = None,
    launch: child.Launch = child.launch_model,
    ready: bool = True,
    **settings: Any,
) -> Iterator[Live]:
    """Serve models from threads of this process; `settings` are ServerConfig's."""
    listener = listen("127.0.0.1", 0)
    loop = asyncio.new_event_loop()
    config = ServerConfig(port=0, **settings)
    certificate = certificate_of(config)
    live = Live(url_of(listener, certificate is not None), loop=loop)
    directory = Path(tempfile.mkdtemp(prefix="anycore-"))

    async def run() -> int:
        # One thread an engine: several of them, or other tests, share these cores.
        single = [model if model.url else replace(model, threads=model.threads or 1) for model in models]
        live.server = Server(
            config,
            single,
            guard or Guard([plain(f"key-{i}", key) for i, key in enumerate(keys, 1)]),
            directory,
            certificate=certificate,
            client=partial(ThreadClient, launch=launch),
        )
        return await live.server.run(listener)

    def main() -> None:
        try:
            live.outcome.append(loop.run_until_complete(run()))
        except BaseException as error:
            live.outcome.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    try:
        live.wait(
            lambda: bool(live.outcome) or live.get("/ready" if ready else "/health").status_code == 200, START_SECONDS
        )
        if live.outcome:
            raise AssertionError(f"the server ended: {live.outcome[0]!r}")
        yield live
    finally:
        for _ in range(2):  # the second one only where requests are left behind
            live.signal(signal.SIGTERM)
            thread.join(3)
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)
