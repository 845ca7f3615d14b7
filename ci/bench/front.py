"""Tokens a second that one front process passes on: the real server before an engine process that computes nothing.

    python ci/bench/front.py MODEL                # 256 streams, one token each a step, as fast as the front takes them
    python ci/bench/front.py MODEL --profile      # where the front's time goes, by function

MODEL gives the tokenizer. The front's own time on a core is counted, not the clock on the wall: engine and client are
processes beside it. What comes in faster than it leaves would pile up, so the engine waits between steps (--step-ms).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import sys
import time
from functools import partial
from typing import Any

from anycore.config import ModelConfig, ServerConfig
from anycore.engine.request import Delta, FinishReason, NewRequest, Stats
from anycore.server import child, wire
from anycore.server.auth import Guard
from anycore.server.bridge import EngineClient
from anycore.server.lifecycle import Server
from anycore.server.port import listen
from anycore.server.run import private_directory

VOCABULARY = range(1000, 20_000)


class FloodEngine:
    """A random token a step for every request there is."""

    def __init__(self, step_seconds: float) -> None:
        self._seconds = step_seconds
        self._left: dict[str, int] = {}
        self._next = time.monotonic()

    def add(self, new: NewRequest) -> None:
        assert new.sampling is not None
        self._left[new.id] = new.sampling.max_tokens or 16

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._left.pop(request_id, None)

    def drain(self) -> list[str]:
        return []

    def has_work(self) -> bool:
        return bool(self._left)

    def stats(self) -> Stats:
        return Stats(running=len(self._left))

    def step(self) -> list[Delta]:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._seconds
        deltas = []
        for name, left in list(self._left.items()):
            self._left[name] = left - 1
            deltas.append(Delta(id=name, token_ids=[random.choice(VOCABULARY)]))
            if left == 1:
                deltas[-1].finish = FinishReason.LENGTH
                del self._left[name]
        return deltas


def launch(step_seconds: float, boot: wire.Boot, progress: child.Progress) -> tuple[wire.Planned, child.Build]:
    planned, _ = child.launch_model(boot, progress)
    return planned, lambda progress: (FloodEngine(step_seconds), planned.card)


async def read_streams(port: int, model: str, streams: int, tokens: int) -> None:
    """The client: every stream at once; bytes are read and dropped."""
    body = json.dumps({"model": model, "prompt": "once", "max_tokens": tokens, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\nconnection: close\r\n\r\n{body}".encode())
        events, last = 0, b""
        while data := await reader.read(1 << 16):
            events += data.count(b"data: {")
            last = (last + data)[-400:]
        if not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            raise SystemExit(f"a stream ended with {last.decode()}")
        return events

    print(sum(await asyncio.gather(*(one() for _ in range(streams)))))


async def measure(options: argparse.Namespace) -> None:
    command = (sys.executable, __file__, options.model, "--role", "engine", "--step-ms", str(options.step_ms))
    config = ModelConfig(model=options.model, task="generate", backend="cpu", kv_cache_memory=256 << 20)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = partial(EngineClient, command=command)
        server = Server(ServerConfig(), [config], Guard(()), private_directory(), client=client)
        serving = asyncio.create_task(server.run(listener))
        while not server.served[0].ready:
            await asyncio.sleep(0.01)
        profiler = cProfile.Profile()
        arguments = (options.model, "--role", "client", "--port", str(port), "--name", config.names[0])
        sizes = ("--streams", str(options.streams), "--tokens", str(options.tokens))
        start, wall = time.thread_time(), time.monotonic()
        if options.profile:
            profiler.enable()
        reading = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *arguments, *sizes, stdout=asyncio.subprocess.PIPE
        )
        events, _ = await reading.communicate()
        profiler.disable()
        took, wall = time.thread_time() - start, time.monotonic() - wall
        count = options.streams * options.tokens
        print(
            f"{options.streams} streams, {count} tokens in {int(events)} events: {1e6 * took / count:.1f} us a token "
            f"on this core, so {count / took:.0f} tokens/s; {wall:.1f} s on the wall"
        )
        server.signalled(15)
        await serving
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=str)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--role", choices=["front", "engine", "client"], default="front", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "engine":
        return child.main(partial(launch, options.step_ms / 1e3))
    if options.role == "client":
        return asyncio.run(read_streams(options.port, options.name, options.streams, options.tokens))
    return asyncio.run(measure(options))


if __name__ == "__main__":
    sys.exit(main())
