"""What a server on this machine does under load, a part at a time: `python ci/load.py PART MODEL [SERVER FLAGS]`.

    streams    so many SSE streams at once: errors, tokens a second, memory
    idle       so many connections that say nothing: memory, and what others notice of them
    overload   three times the rate that saturates it: what is taken keeps its latency, the rest gets 429 at once
    short      short requests beside a stream of long prompts, by the order of those that wait

Every part prints the load average beside its figures: where it is far above what the part itself makes, they are of a
busy machine and say little about latency. Further arguments go to the server and win over those given here, such as
`--max-num-batched-tokens 128`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx
from faults.watch import blocks_free, held, processes, resident
from server.harness import Live, serve_process

from anycore.bench.client import Outcome
from anycore.bench.load import Load
from anycore.bench.report import percentile, summarize
from anycore.bench.workers import run_load

GOAL_MS = 500.0
SETTLE = 600.0  # seconds in which what was begun must end


@contextmanager
def serve(options: argparse.Namespace, *flags: str) -> Iterator[Live]:
    """Start a server of the model under the name "lm" on this machine's CPU, and try it out."""
    cores = str(len(os.sched_getaffinity(0)))
    settings = ("--served-model-name", "lm", "--backend", "cpu", "--log-level", "warning", "--threads", cores)
    with serve_process(options.model, *settings, *flags, *options.flags) as live:
        live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 2}).raise_for_status()
        yield live


def load_of(live: Live, **settings: Any) -> Load:
    return Load(url=live.url + "/v1", model="lm", **settings)


def shown(title: str, outcomes: list[Outcome]) -> dict[str, Any]:
    """Print the figures of a load; return them."""
    found = summarize(outcomes, {})
    times = "  ".join(
        f"{name} p50 {found[f'median_{name}_ms']:.0f} p99 {found[f'p99_{name}_ms']:.0f} ms"
        for name in ("ttft", "itl")
        if f"p99_{name}_ms" in found
    )
    print(
        f"{title}: {found['completed']} answered in {found['duration']:.0f} s ({found['request_throughput']:.2f}/s, "
        f"{found['output_throughput']:.0f} tokens/s), {found['failed']} not {found.get('errors', '')}  {times}  "
        f"load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return found


class Memory:
    """Samples the memory of a server's processes until it is left."""

    def __init__(self, live: Live) -> None:
        self._pids = processes(live)
        self.before = self.most = self.after = resident(self._pids)
        self._end = Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.after = resident(self._pids)

    def _sample(self) -> None:
        while not self._end.wait(0.5):
            self.most = max(self.most, resident(self._pids))

    def __str__(self) -> str:
        return f"RSS {self.before:.0f} MiB before, {self.most:.0f} at most, {self.after:.0f} after"


def streams(options: argparse.Namespace) -> int:
    bad = 0
    with serve(options, "--max-num-seqs", str(options.number), "--kv-cache-memory", "1GiB") as live:
        free = blocks_free(live)
        for round_ in range(options.rounds):
            load = load_of(live, num_prompts=options.number, max_concurrency=options.number, seed=round_,
                           input_len=(8, 24), output_len=(options.tokens,) * 2)  # fmt: skip
            with Memory(live) as memory:
                found = shown(f"{options.number} streams", run_load(load, 1)[0])
            print(f"  at once {found['max_concurrent_requests']}, {memory}", flush=True)
            bad += found["failed"] + (found["max_concurrent_requests"] < options.number)
        live.wait(lambda: held(live) == 0, 60)
        print(f"  blocks free {free} before, {blocks_free(live)} after")
        bad += blocks_free(live) != free
    return bad


def idle(options: argparse.Namespace) -> int:
    wanted = options.number + 100
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{options.number} connections need {wanted} descriptors, `ulimit -Hn` allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))
    with serve(options, "--kv-cache-memory", "256MiB") as live:
        before, memory = probe(live), resident(processes(live))
        asyncio.run(with_connections(live, options.number, before, memory))
        time.sleep(2)
        print(f"  all closed: RSS {resident(processes(live)):.0f} MiB, {probe(live)}")
    return 0


async def with_connections(live: Live, number: int, before: str, memory: float) -> None:
    """Open so many connections, ask something beside them, and close them."""
    parts = httpx.URL(live.url)
    began = time.monotonic()
    writers, readers = [], []
    for _ in range(number):
        reader, writer = await asyncio.open_connection(parts.host, parts.port)
        readers.append(reader)
        writers.append(writer)
    took = time.monotonic() - began
    after = await asyncio.to_thread(probe, live)
    still = sum(not reader.at_eof() for reader in readers)
    print(
        f"{number} connections opened in {took:.1f} s, {still} open at the end of the probe; "
        f"RSS {memory:.0f} MiB before, {resident(processes(live)):.0f} with them, "
        f"load average {os.getloadavg()[0]:.1f}\n  before: {before}\n  beside them: {after}",
        flush=True,
    )
    for writer in writers:
        writer.close()


def probe(live: Live) -> str:
    """Milliseconds of a probe of health and of a short request, on one connection."""
    body = {"model": "lm", "prompt": "a", "max_tokens": 1}
    with live.client() as client:
        client.get("/health")
        health = [elapsed(lambda: client.get("/health")) for _ in range(20)]
        answers = [elapsed(lambda: client.post("/v1/completions", json=body)) for _ in range(10)]
    return f"/health median {percentile(sorted(health), 50):.1f} ms, one token {percentile(sorted(answers), 50):.0f} ms"


def elapsed(ask: Callable[[], httpx.Response]) -> float:
    began = time.monotonic()
    assert ask().status_code == 200
    return 1e3 * (time.monotonic() - began)


def overload(options: argparse.Namespace) -> int:
    places = ("--max-num-seqs", str(options.places), "--max-queued", str(options.places))
    with serve(options, *places, "--kv-cache-memory", "256MiB") as live:
        base = load_of(live, input_len=(16, 64), output_len=(16, 16))
        full = replace(base, duration=options.seconds / 5, max_concurrency=2 * options.places)
        found = shown("saturated, queue full", run_load(full, 1)[0])
        rate = 3 * found["request_throughput"]
        with Memory(live) as memory:
            outcomes, busy = run_load(replace(base, request_rate=rate, duration=options.seconds, seed=1), 1)
        over = shown(f"3 times that, {rate:.2f}/s", outcomes)
        refused = sorted(1e3 * outcome.total for outcome in outcomes if outcome.status == 429)
        other = sum(bool(outcome.error) and outcome.status != 429 for outcome in outcomes)
        print(
            f"  429 after p50 {percentile(refused, 50):.0f}, p99 {percentile(refused, 99):.0f} ms; "
            f"other errors {other}; TTFT p99 of those taken {over['p99_ttft_ms'] / found['p99_ttft_ms']:.2f} times as "
            f"long; generator busy {busy:.0%}; {memory}"
        )
    return other


def short(options: argparse.Namespace) -> int:
    rate = 0.0
    for policy in options.policies:
        with serve(options, "--scheduling-policy", policy, "--kv-cache-memory", "1GiB") as live:
            base = load_of(live, input_len=(16, 64), output_len=(64, 64))
            if not rate:
                full = replace(base, duration=options.seconds / 2, max_concurrency=64)
                rate = 0.7 * shown("saturated by short requests", run_load(full, 1)[0])["request_throughput"]
            end = Event()
            beside = Thread(target=long_prompts, args=(live, end))
            beside.start()
            outcomes, _ = run_load(replace(base, request_rate=rate, duration=options.seconds, seed=1), 1)
            end.set()
            shown(f"{policy}, {rate:.2f}/s beside 4096-token prompts", outcomes)
            within = sum(not o.error and 1e3 * o.first <= GOAL_MS for o in outcomes) / len(outcomes)
            print(f"  {within:.1%} had their first token within {GOAL_MS:.0f} ms", flush=True)
            beside.join()
    return 0


def long_prompts(live: Live, end: Event) -> None:
    """Prompts of 4096 tokens one after the other, each another one."""
    number = 0
    with httpx.Client(base_url=live.url, timeout=SETTLE) as client:
        while not end.is_set():
            number += 1
            prompt = [1000 + (number * 7919 + place * 31) % 9000 for place in range(4096)]
            client.post("/v1/completions", json={"model": "lm", "prompt": prompt, "max_tokens": 1})


PARTS = {"streams": (streams, 512), "idle": (idle, 10_000), "overload": (overload, 0), "short": (short, 0)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model")
    parser.add_argument("--number", type=int, help="streams (default: 512) or connections (default: 10000)")
    parser.add_argument("--rounds", type=int, default=2, help="of streams")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream")
    parser.add_argument("--places", type=int, default=16, help="sequences that run, and that may wait, under overload")
    parser.add_argument("--seconds", type=float, default=300, help="of overload, and of short requests")
    parser.add_argument("--policies", nargs="+", default=["short-first", "fcfs"], help="of short")
    options, flags = parser.parse_known_args()
    options.flags = flags
    part, number = PARTS[options.part]
    options.number = options.number or number
    return int(part(options) > 0)


if __name__ == "__main__":
    sys.exit(main())
