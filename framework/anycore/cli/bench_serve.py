"""Puts a running server under load and prints throughput and latencies, named as vLLM's `bench serve` names them.

Any server with the OpenAI routes will do. Prompts are random token ids where the route takes ids, else random words;
tokens are counted by the server's usage. The same seed makes the same requests at the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from pathlib import Path

from anycore.bench.load import PATHS, Load, Range
from anycore.cli.flags import Parser
from anycore.errors import AnycoreError, ConfigError

BUSY = 0.8
"""Share of its time above which a process of the generator may be what limits the figures."""

SLO = ("ttft", "tpot", "itl")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="base URL (default: http://127.0.0.1:8000/v1)"
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="name of the served model")
    parser.add_argument(
        "--endpoint", choices=tuple(PATHS), default="completions", help="what is asked (default: completions)"
    )
    parser.add_argument("--workload", metavar="random|FILE", default="random",
                        help="random prompts, or a file with one JSON object a line: prompt and max_tokens, or "
                        "ShareGPT's conversations (default: random)")  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=256, metavar="N", help="requests (default: 256)")
    parser.add_argument("--input-len", type=_range, default=(100, 1024), metavar="N|MIN:MAX",
                        help="tokens, or words, of a prompt or document (default: 100:1024)")  # fmt: skip
    parser.add_argument("--output-len", type=_range, default=(100, 1024), metavar="N|MIN:MAX",
                        help="tokens generated after each prompt, never fewer (default: 100:1024)")  # fmt: skip
    parser.add_argument(
        "--prefix-len", type=int, default=0, metavar="N", help="tokens before them that all prompts share"
    )
    parser.add_argument("--vocab-size", type=int, default=10_000, metavar="N",
                        help="random ids are below this (default: 10000)")  # fmt: skip
    parser.add_argument(
        "--documents", type=int, default=100, metavar="N", help="documents of a rerank request (default: 100)"
    )
    parser.add_argument("--request-rate", type=float, default=math.inf, metavar="R",
                        help="requests a second; inf sends as many as may be open (default: inf)")  # fmt: skip
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                        help="1: Poisson arrivals; less comes in bursts, more comes evenly (default: 1)")  # fmt: skip
    parser.add_argument("--max-concurrency", type=int, metavar="C", help="requests open at once (default: no limit)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default: 0)"
    )
    parser.add_argument(
        "--num-warmups", type=int, default=1, metavar="N", help="requests sent before, unmeasured (default: 1)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that share the load (default: 1)"
    )
    parser.add_argument("--extra-body", type=_object, default={}, metavar="JSON",
                        help='further fields of every request, such as {"temperature": 0.6}')  # fmt: skip
    for name in SLO:
        parser.add_argument(f"--slo-{name}", type=float, metavar="MS", help=f"limit on {name} that goodput counts by")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key to send (better: ANYCORE_API_KEY, which does not show in ps)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest silence in seconds (default: 600)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="append the figures to FILE as one line; - prints that line alone"
    )


def run(options: argparse.Namespace) -> int:
    load = load_of(options)
    try:
        from anycore.bench.client import try_out
        from anycore.bench.report import lines, summarize
        from anycore.bench.workers import run_load
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError("bench serve needs aiohttp: pip install 'anycore[bench]'") from error

    broken = asyncio.run(try_out(load, options.num_warmups))
    if broken is not None:
        raise AnycoreError(f"{load.target} does not answer ({broken.status or 'no status'}): {broken.error}")
    outcomes, busy = run_load(load, options.processes)
    slo = {name: limit for name in SLO if (limit := getattr(options, f"slo_{name}")) is not None}
    figures = summarize(outcomes, slo)
    rate = None if math.isinf(load.request_rate) else load.request_rate
    asked = {"request_rate": rate, "max_concurrency": load.max_concurrency, "num_prompts": load.num_prompts}
    row = {"model": load.model, "endpoint": load.endpoint} | asked | figures | {"generator_busy": busy}
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    if options.json == "-":
        print(line)
    else:
        print("\n".join(lines(figures)))
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(line + "\n")
    if busy > BUSY:
        print(f"anycore: the load generator was busy {busy:.0%} of the time and may be what was measured: "
              "raise --processes", file=sys.stderr)  # fmt: skip
    return 1 if figures["failed"] else 0


def load_of(options: argparse.Namespace) -> Load:
    """Check the numbers and put them together."""
    at_least = {"num_prompts": 1, "prefix_len": 0, "vocab_size": 2, "documents": 1, "num_warmups": 0, "processes": 1}
    for name, least in {**at_least, "max_concurrency": options.processes}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}", param=name)
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {getattr(options, name)}", param=name)
    file = None if options.workload == "random" else Path(options.workload)
    if file is not None and not file.is_file():
        raise ConfigError(f"--workload {options.workload} is neither random nor a file", param="workload")
    return Load(
        url=options.url.rstrip("/"),
        model=options.model,
        endpoint=options.endpoint,
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        prefix_len=options.prefix_len,
        vocab_size=options.vocab_size,
        documents=options.documents,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        seed=options.seed,
        file=file,
        extra=options.extra_body,
        api_key=options.api_key or os.environ.get("ANYCORE_API_KEY", "").split(",")[0],
        timeout=options.timeout,
    )


def _range(text: str) -> Range:
    """A number, or the least and the greatest one."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"must be a number such as 128, or a range such as 100:1024, not {text!r}")
    return found


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return found
