"""vLLM's server and ours on one card, put under the same load in turns by `anycore bench serve`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from turns import Row

COMMON = ["--served-model-name", "m", "--max-model-len", "4096", "--max-num-seqs", "256", "--gpu-memory-utilization"]
START_SECONDS = 240
SATURATED = 256  # requests open at once
SHARES = (0.25, 0.5, 0.75)
RATE_SECONDS = 20
IDS = 150_000  # random ids are below this


class Served:
    """A server in a process of its own, which has answered once."""

    def __init__(self, engine: str, folder: str, port: int, share: float, fronts: int, log: Path) -> None:
        self.engine, self.url = engine, f"http://127.0.0.1:{port}/v1"
        command = {
            "vllm": "-m vllm.entrypoints.cli.main serve {} --disable-uvicorn-access-log",
            "anycore": "-m anycore serve {} --max-queued 8192",
        }[engine]
        words = [sys.executable, *command.format(folder).split(), *COMMON, str(share), "--port", str(port)]
        if fronts > 1:
            words += [{"vllm": "--api-server-count", "anycore": "--api-servers"}[engine], str(fronts)]
        start = time.monotonic()
        with log.open("a") as file:
            self._process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        body = json.dumps({"model": "m", "prompt": [100] * 16, "max_tokens": 1}).encode()
        while not answers(f"{self.url}/completions", body):
            if self._process.poll() is not None or time.monotonic() - start > START_SECONDS:
                self.close()
                raise RuntimeError(f"{engine} does not serve: see {log}")
            time.sleep(0.05)
        self.start_seconds = time.monotonic() - start

    def load(self, number: int, seed: int, *words: str) -> Row:
        """Put it under load once. Seeds differ from turn to turn: a prompt is never in the prefix cache."""
        command = [sys.executable, "-m", "anycore.cli.main", "bench", "serve", "--url", self.url, "--model", "m"]
        command += ["--num-prompts", str(number), "--seed", str(seed), "--vocab-size", str(IDS), "--processes", "6"]
        command += ["--extra-body", '{"temperature": 0.6}', "--json", "-", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        row: Row = json.loads(done.stdout)
        return row

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answers(url: str, body: bytes) -> bool:
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def serve_both(folder: str, options: argparse.Namespace) -> Iterator[Row]:
    """Start both servers, saturate them in turns, then offer both the same shares of the peer's saturation."""
    model = Path(folder).name
    share = options.share or 0.45
    with ExitStack() as stack:
        served = []
        for place, engine in enumerate(("vllm", "anycore")):
            log = options.out.with_name(f"{engine}-serve.log")
            fronts = options.fronts if engine == "anycore" else options.peer_fronts
            server = Served(engine, folder, options.port + place, share, fronts, log)
            stack.callback(server.close)
            served.append(server)
            row = {"part": "start", "model": model, "engine": engine, "way": "HTTP", "caches": "as found"}
            yield row | {"seconds": server.start_seconds}
        for server in served:
            server.load(64, 1, "--output-len", "16:64")
        rate = None if options.only in (None, "saturation") else float(options.only)
        if rate is None:
            reached = []
            count = 768 if "0.5b" in model else 512
            for turn in range(2):
                for server in served if turn else reversed(served):
                    row = server.load(count, 10 + turn, "--max-concurrency", str(SATURATED))
                    yield {"part": "http", "engine": server.engine, "load": "saturation"} | row | {"model": model}
                    if server.engine == "vllm":
                        reached.append(row["request_throughput"])
            rate = statistics.median(reached)
        for part in SHARES if options.only != "saturation" else ():
            for server in served:
                words = ("--request-rate", f"{rate * part:.3f}")
                row = server.load(max(64, int(rate * part * RATE_SECONDS)), 20 + int(100 * part), *words)
                yield {"part": "http", "engine": server.engine, "load": f"{part:.0%}"} | row | {"model": model}
