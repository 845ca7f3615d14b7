"""anycore's server on the CPU: its start beside llama-server's (G4), and 32 streams beside the same prompts offline.

    LLAMA_SERVER=llama-server python ci/bench/served.py MODEL FILE.gguf [--ours '--dtype bfloat16 --quantization w8a8']

G4 is the time from the start of the process to the first token behind 128, files in memory: at most twice the peer's,
and three seconds. The streams are G2's prompts, sent at once, 128 tokens each; client and server share the cores. 85 %
of the offline speed are wanted. All take turns, each in a new process; exits with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anycore.cli.workloads import GENERATIONS, Ids, corpus

START_GOAL, START_SECONDS, STREAMS_GOAL = 2.0, 3.0, 0.85
PATIENCE = 120
ANYCORE = [sys.executable, "-m", "anycore.cli.main"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""With that each start of a checkout compiles anycore's own sources, which come compiled where it is installed."""
Words = list[str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", help="the same model as GGUF, for llama-server")
    parser.add_argument("--ours", default="--dtype bfloat16", help="flags of anycore with their values")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("start", "streams"))
    options = parser.parse_args()
    ids = tokens_of(options.model)
    flags, good = options.ours.split(), True
    if options.only != "streams":
        good &= starts(options.model, options.file, flags, ids, options.rounds)
    if options.only != "start":
        good &= streams(options.model, flags, ids, options.rounds)
    return 0 if good else 1


def starts(model: str, file: str, flags: Words, ids: Ids, rounds: int) -> bool:
    prompt = GENERATIONS["G1"].prompts(ids, 0)[0]
    ours, theirs = [], []
    for number in range(rounds + 1):
        started = time.perf_counter()
        with served([*ANYCORE, "serve", model, *flags], "/ready") as port:
            completions(port, {"model": name_of(port), "prompt": prompt, "max_tokens": 1, "temperature": 0})
            mine = time.perf_counter() - started
        started = time.perf_counter()
        peer = [os.environ.get("LLAMA_SERVER", "llama-server"), "-m", file, "-np", "1", "-c", "2048"]
        with served([*peer, "-t", str(len(os.sched_getaffinity(0)))], "/health") as port:
            ask(port, "/completion", {"prompt": prompt, "n_predict": 1, "temperature": 0})
            other = time.perf_counter() - started
        if number > 0:  # the first ones read the files
            ours.append(mine)
            theirs.append(other)
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"G4 s      anycore {spread(ours)}  llama.cpp {spread(theirs)}  {a / b:.2f} times, at most {START_GOAL:g}")
    return a <= START_GOAL * b and a <= START_SECONDS


def streams(model: str, flags: Words, ids: Ids, rounds: int) -> bool:
    """Tokens a second of all streams, beside those of `anycore bench offline`."""
    work = GENERATIONS["G2"]
    online: list[float] = []
    offline: list[float] = []
    for _ in range(rounds):
        command = [*ANYCORE, "bench", "offline", model, "--workload", "G2", "--runs", "1", *flags]
        offline.append(
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, env=ENVIRONMENT, check=True).stdout)["out_tok_s"]
        )
        with served([*ANYCORE, "serve", model, *flags], "/ready") as port:
            fixed = {"model": name_of(port), "temperature": 0, "ignore_eos": True, "stream": True}
            fixed |= {"stream_options": {"include_usage": True}}
            completions(port, fixed | {"prompt": GENERATIONS["G1"].prompts(ids, 99)[0], "max_tokens": 8})
            bodies = [fixed | {"prompt": prompt, "max_tokens": work.new_tokens} for prompt in work.prompts(ids, 0)]
            started = time.perf_counter()
            with ThreadPoolExecutor(len(bodies)) as pool:
                replies = list(pool.map(completions, [port] * len(bodies), bodies))
            wall = time.perf_counter() - started
        made = sum(usage(reply) for reply in replies)
        assert made == len(bodies) * work.new_tokens, f"{made} tokens came"
        online.append(made / wall)
    share = statistics.median(online) / statistics.median(offline)
    print(f"streams tok/s  HTTP {spread(online)}  offline {spread(offline)}  {share:.2f}, wanted are {STREAMS_GOAL:g}")
    return share >= STREAMS_GOAL


@contextlib.contextmanager
def served(command: Words, path: str) -> Iterator[int]:
    """Start a server; give its port when it is ready, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    try:
        began = time.perf_counter()
        while not ready(port, path):
            assert process.poll() is None, f"{command[0]} ended with code {process.poll()}"
            assert time.perf_counter() - began < PATIENCE, f"{command[0]} is not ready"
            time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait()


def ready(port: int, path: str) -> bool:
    try:
        ask(port, path)
    except (OSError, AssertionError):
        return False
    return True


def ask(port: int, path: str, body: Any = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == 200, f"{path}: {reply.status} {content[:200]!r}"
        return content


def completions(port: int, body: Any) -> bytes:
    return ask(port, "/v1/completions", body)


def name_of(port: int) -> str:
    return str(json.loads(ask(port, "/v1/models"))["data"][0]["id"])


def usage(reply: bytes) -> int:
    """Tokens that a stream says it has made, in its last event but [DONE]."""
    events = [line[6:] for line in reply.splitlines() if line.startswith(b"data: {")]
    return int(json.loads(events[-1])["usage"]["completion_tokens"])


def tokens_of(model: str) -> Ids:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(f"{model}/tokenizer.json").encode(corpus(), add_special_tokens=False).ids)


def spread(found: list[float]) -> str:
    return f"{statistics.median(found):.4g} ({min(found):.4g}-{max(found):.4g})"


if __name__ == "__main__":
    sys.exit(main())
