"""Measures what a front process takes for requests and for tokens: the real server, in this process, between an engine
that computes nothing and a client that drops what it reads. Its own time on a core is counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
import numpy as np

from anycore.cli.flood import Flow
from anycore.config import ModelConfig, ServerConfig
from anycore.engine.launch import Prepared
from anycore.errors import Unavailable
from anycore.server import wire
from anycore.server.auth import Guard
from anycore.server.bridge import EngineClient
from anycore.server.lifecycle import Server
from anycore.server.port import listen
from anycore.server.run import private_directory
from anycore.simulate.measured import FrontTimes
from anycore.simulate.steptime import positive

READY_SECONDS = 60.0
SHORT, LONG = 16, 2048
"""Tokens of prompts."""
SETTLING = Flow(streams=4, requests=4, prompt=SHORT, tokens=8)
"""Before anything counts: imports and caches."""


def flows(longest: int) -> list[Flow]:
    """Requests that are short and long, tokens one by one, together, faster than they can be passed on, and mixed."""
    most = max(1, min(200, longest - SHORT))
    return [
        Flow(streams=4, requests=20, prompt=SHORT, tokens=1),
        Flow(streams=4, requests=10, prompt=max(SHORT, min(LONG, longest - 1)), tokens=1),
        Flow(streams=1, requests=1, prompt=SHORT, tokens=most, step=0.001),
        Flow(streams=32, requests=1, prompt=SHORT, tokens=min(40, most), step=0.02),
        Flow(streams=32, requests=1, prompt=SHORT, tokens=most, step=0.0001),
        Flow(streams=8, requests=3, prompt=max(SHORT, min(256, longest - 32)), tokens=min(24, most), step=0.01),
    ]


@dataclass(frozen=True)
class Spent:
    """What a flow took, and of how many events it was made."""

    flow: Flow
    seconds: float  # of the front, on a core
    events: int
    wakes: int  # times that it took what the engine had reported


class Counting(EngineClient):
    """A client that counts how often it is woken."""

    wakes = 0
    _is_awake = False

    def _handle_output(self, output: wire.Output) -> None:
        if not self._is_awake:
            self._is_awake = True
            Counting.wakes += 1
            asyncio.get_running_loop().call_soon(self._sleep)
        super()._handle_output(output)

    def _sleep(self) -> None:
        self._is_awake = False


def measure(prepared: Prepared, times: int = 2) -> FrontTimes:
    """Measure the front of a model, each flow so many times."""
    longest = prepared.plan.limits.max_model_len if prepared.plan is not None else LONG
    log = logging.getLogger("anycore")
    level = log.level
    log.setLevel(logging.WARNING)  # else there would be a line for each of its requests
    try:
        return fitted(asyncio.run(through(prepared, times * flows(longest))))
    finally:
        log.setLevel(level)


async def through(prepared: Prepared, order: Sequence[Flow]) -> list[Spent]:
    """Send flows through one server, one after the other."""
    source, vocabulary = prepared.source, prepared.spec.vocab_size
    config = ModelConfig(model=prepared.config.model, task="generate")
    gguf = str(source.gguf) if source.gguf else None
    about = msgspec.json.encode(wire.Planned(prepared.card(), source.name, str(source.folder), gguf)).decode()
    command = (sys.executable, "-m", "anycore.cli.flood_engine", about, str(vocabulary))
    directory = private_directory()
    try:
        with listen("127.0.0.1", 0) as listener:
            client = partial(Counting, command=command)
            server = Server(ServerConfig(log_level="error"), [config], Guard(()), directory, client=client)
            serving = asyncio.create_task(server.run(listener))
            try:
                await ready(server, serving)
                send = partial(spent, listener.getsockname()[1], config.names[0], vocabulary)
                await send(SETTLING)
                return [await send(flow) for flow in order]
            finally:
                server.signalled(15)
                await serving
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def ready(server: Server, serving: asyncio.Task[int]) -> None:
    end = time.monotonic() + READY_SECONDS
    while not server.served[0].ready:
        if serving.done() or time.monotonic() > end:
            raise Unavailable("the front that was to be measured did not become ready")
        await asyncio.sleep(0.01)


async def spent(port: int, model: str, vocabulary: int, flow: Flow) -> Spent:
    """Let a client send a flow; return what the front took for it."""
    pipe = asyncio.subprocess.PIPE
    asked = json.dumps({"model": model, "vocabulary": vocabulary, "flow": asdict(flow)})
    words = (sys.executable, "-m", "anycore.cli.flood", str(port), asked)
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        await asyncio.sleep(0.02)  # its connections are taken
        Counting.wakes = 0
        began = time.thread_time()
        found, _ = await process.communicate(b"\n")
        took = time.thread_time() - began
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Unavailable(f"the client of the front that was to be measured ended with {process.returncode}")
    return Spent(flow, took, int(found), Counting.wakes)


def fitted(found: Sequence[Spent]) -> FrontTimes:
    """Fit what a request, a token of a prompt, a wake, a piece and a token take to the least of what was measured."""
    least: dict[Flow, Spent] = {}
    for one in found:
        if one.flow not in least or one.seconds < least[one.flow].seconds:
            least[one.flow] = one
    rows = []
    for flow, one in least.items():
        requests = flow.streams * flow.requests
        pieces = one.events - 2 * requests  # the end of an answer and its usage are events, too
        rows.append([requests, requests * flow.prompt, one.wakes, pieces, requests * flow.tokens])
    took = np.array([one.seconds for one in least.values()])
    values = positive(np.array(rows, dtype=float) / took[:, None], np.ones_like(took))
    return FrontTimes(*(float(value) for value in values))
