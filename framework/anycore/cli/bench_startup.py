"""Times a server's start, several times: until the port answers, until it is ready, until its first answer.

Each time a new process is started. With warm caches one start goes before, unmeasured. With cold ones the model's files
are dropped from the system's page cache before each start, and what anycore itself keeps (compiled kernels) is made
anew; caches that a vendor's libraries keep elsewhere stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anycore import __version__
from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags
from anycore.cli.settings import given
from anycore.config import ModelConfig
from anycore.errors import AnycoreError, ConfigError

POLL_SECONDS = 0.01
STOP_SECONDS = 30
FIRST: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}),
    "embed": ("/v1/embeddings", {"input": "Hello"}),
    "rerank": ("/v1/rerank", {"query": "Hello", "documents": ["Hello"]}),
}
"""What the first request asks, by task."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id, modelscope:ID or pkg:NAME")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="measured starts of each kind (default: 3)")
    parser.add_argument(
        "--caches", choices=("warm", "cold", "both"), default="warm", help="state of caches at a start (default: warm)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one start (default: 600)")
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    if options.runs < 1:
        raise ConfigError(f"--runs must be at least 1, not {options.runs}", param="runs")
    model = Path(options.model)
    if options.caches != "warm" and not model.exists():
        raise ConfigError(
            f"--caches {options.caches} needs a model that lies here as a folder or file, not {options.model}",
            param="caches",
        )
    if options.caches != "warm" and not hasattr(os, "posix_fadvise"):
        raise ConfigError("--caches cold needs a system that can drop files from its page cache", param="caches")
    settings = given(options, ModelConfig) | {"model": options.model, "port": 0}
    with tempfile.TemporaryDirectory(prefix="anycore-") as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "anycore.cli.main", "serve", "--config", str(file)]
        if options.caches != "cold":
            start(command, {}, options.timeout)
            report(options, "warm", [start(command, {}, options.timeout) for _ in range(options.runs)])
        if options.caches != "warm":
            cold = []
            for number in range(options.runs):
                forget(model)
                cold.append(start(command, {"ANYCORE_CACHE": f"{folder}/cache{number}"}, options.timeout))
            report(options, "cold", cold)
    return 0


def start(command: Sequence[str], environment: dict[str, str], timeout: float) -> dict[str, float]:
    """Start a server, ask it once and stop it; return the seconds from its start to each stage.

    Raises:
        AnycoreError: it ended, or was not ready in time.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith("anycore: http"):
                process.wait(STOP_SECONDS)
                log.seek(0)
                raise AnycoreError(f"the server ended: {log.read()[-1000:].strip()}")
            url, found = line.split()[1], {"port_s": time.perf_counter() - began}
            while not ready(url):
                if process.poll() is not None or time.perf_counter() - began > timeout:
                    log.seek(0)
                    raise AnycoreError(f"the server was not ready in {timeout:g} s: {log.read()[-1000:].strip()}")
                time.sleep(POLL_SECONDS)
            found["ready_s"] = time.perf_counter() - began
            task = ask(f"{url}/v1/models", None)["data"][0].get("tasks", ["generate"])[0]
            path, body = FIRST[task]
            ask(url + path, body)
            return found | {"first_answer_s": time.perf_counter() - began}
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def ready(url: str) -> bool:
    try:
        ask(f"{url}/ready", None)
    except OSError:  # a 503 is one, too
        return False
    return True


def ask(url: str, body: dict[str, Any] | None) -> Any:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("ANYCORE_API_KEY", "").split(",")[0]
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=STOP_SECONDS) as response:
        return json.load(response)


def forget(model: Path) -> None:
    """Drop a model's files from the page cache; pages that a process maps stay, and none should now."""
    for path in [model] if model.is_file() else sorted(p for p in model.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(options: argparse.Namespace, caches: str, starts: list[dict[str, float]]) -> None:
    row: dict[str, Any] = {"anycore": __version__, "model": options.model, "caches": caches, "runs": len(starts)}
    for name in starts[0]:
        values = [found[name] for found in starts]
        row |= {name: round(statistics.median(values), 4), f"min_{name}": round(min(values), 4),
                f"max_{name}": round(max(values), 4)}  # fmt: skip
    print(json.dumps(row), flush=True)
