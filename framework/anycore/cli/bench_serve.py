"""Puts a running server under load and prints throughput and latencies, named as vLLM's `bench serve` names them.

Any server with the OpenAI routes will do. Prompts are random token ids where the route takes ids, else random words;
tokens are counted by the server's usage. The same seed makes the same requests at the same times. Several rates or
concurrencies, separated by commas, make a sweep; with --peer two servers take turns at every point of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

from anycore import __version__
from anycore.bench.latencies import LABELS
from anycore.bench.load import PATHS, Load, Range
from anycore.cli.addresses import address
from anycore.cli.flags import Parser, numbers
from anycore.errors import AnycoreError, ConfigError

BUSY = 0.8
"""Share of its time above which a process of the generator may be what limits the figures."""

PLOTS = (".html", ".png", ".svg")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000/v1", help="base URL (default: http://127.0.0.1:8000/v1)"
    )
    parser.add_argument("--model", metavar="NAME", required=True, help="name of the served model")
    parser.add_argument(
        "--endpoint", choices=tuple(PATHS), default="completions", help="what is asked (default: completions)"
    )
    parser.add_argument("--workload", metavar="random|FILE", default="random",
                        help="random prompts; or a file with one JSON object a line: prompt, max_tokens and perhaps at "
                        "(seconds), ShareGPT's conversations (also as one list), or a trace's timestamp, input_length, "
                        "output_length and hash_ids (default: random)")  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=256, metavar="N",
                        help="requests, or conversations (default: 256; of a file with times: all of it)")  # fmt: skip
    parser.add_argument("--duration", type=float, metavar="S",
                        help="seconds in which requests are begun, instead of --num-prompts")  # fmt: skip
    parser.add_argument("--turns", type=_range, default=(1, 1), metavar="N|MIN:MAX",
                        help="with --endpoint chat: turns of a conversation, each sent with the server's answers "
                        "to those before it (default: 1)")  # fmt: skip
    parser.add_argument("--input-len", type=_range, default=(100, 1024), metavar="N|MIN:MAX",
                        help="tokens, or words, of a prompt or document (default: 100:1024)")  # fmt: skip
    parser.add_argument("--output-len", type=_range, default=(100, 1024), metavar="N|MIN:MAX",
                        help="tokens generated after each prompt, never fewer (default: 100:1024)")  # fmt: skip
    parser.add_argument("--prefix-len", type=int, default=0, metavar="N", help="tokens before them that prompts share")
    parser.add_argument("--num-prefixes", type=int, default=1, metavar="N",
                        help="different ones of these, drawn for each prompt (default: 1: all share it)")  # fmt: skip
    parser.add_argument("--vocab-size", type=int, default=10_000, metavar="N",
                        help="random ids are below this (default: 10000)")  # fmt: skip
    parser.add_argument(
        "--documents", type=int, default=100, metavar="N", help="documents of a rerank request (default: 100)"
    )
    parser.add_argument("--request-rate", type=numbers(float), default=[math.inf], metavar="R[,R...]",
                        help="requests a second; inf sends as many as may be open (default: inf)")  # fmt: skip
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                        help="1: Poisson arrivals; less comes in bursts, more comes evenly (default: 1)")  # fmt: skip
    parser.add_argument("--max-concurrency", type=numbers(int), default=[None], metavar="C[,C...]",
                        help="requests, or conversations, open at once (default: no limit)")  # fmt: skip
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
    parser.add_argument("--goodput", type=_limit, nargs="+", default=[], metavar="NAME:MS",
                        help="limits that goodput counts by, such as ttft:500 itl:50; also tpot and e2el")  # fmt: skip
    parser.add_argument("--peer", metavar="URL", help="a second server, which gets the same requests in turns")
    parser.add_argument("--peer-model", metavar="NAME", help="the model's name there (default: the same)")
    parser.add_argument("--peer-api-key", metavar="KEY", default="", help="key to send there")
    parser.add_argument("--rounds", type=int, default=1, metavar="N",
                        help="runs at each point; who begins alternates (default: 1)")  # fmt: skip
    parser.add_argument(
        "--api-key", metavar="KEY", help="key to send (better: ANYCORE_API_KEY, which does not show in ps)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest silence in seconds (default: 600)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="append a line a run to FILE, with all that repeats it; - prints these alone"
    )
    parser.add_argument("--save-detailed", action="store_true", help="with --json: every request's times, too")
    parser.add_argument("--plot", metavar="FILE.html|.png|.svg",
                        help="draw the figures, of a sweep over its points, with a line for each server; "
                        "PNG needs pip install 'anycore[plots]'")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    points = loads_of(options)
    try:
        from anycore.bench import client, runs
        from anycore.bench.report import lines
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError("bench serve needs aiohttp: pip install 'anycore[bench]'") from error

    draw = drawer(options.plot) if options.plot else None
    sides = {load.url: load for load in points[0]}
    facts = {}
    for load in sides.values():
        broken = asyncio.run(client.try_out(load, options.num_warmups))
        if broken is not None:
            raise AnycoreError(f"{load.target} does not answer ({broken.status or 'no status'}): {broken.error}")
        facts[load.url] = asyncio.run(client.about(load))
    rows: list[dict[str, Any]] = []
    text: list[str] = []
    for load in runs.turns(points, options.rounds):
        row = runs.measure(load, options.processes, dict(options.goodput), options.save_detailed)
        row |= {"run": circumstances(), "server": facts[load.url]}
        rows.append(row)
        said = [runs.heading(row), *lines(row)]
        text += said
        if options.json == "-":
            print(json.dumps(row))
        else:
            print("\n".join(said), flush=True)
        if options.json and options.json != "-":
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    table = list(runs.compared(rows, [load.url for load in sides.values()])) if len(rows) > 1 else []
    if table and options.json != "-":
        print("\n".join(table))
    if draw is not None:
        Path(options.plot).write_bytes(draw(rows, [*text, *table]))
    busy = max(row["generator_busy"] for row in rows)
    if busy > BUSY:
        print(f"anycore: the load generator was busy {busy:.0%} of the time and may be what was measured: "
              "raise --processes", file=sys.stderr)  # fmt: skip
    return int(any(row["failed"] for row in rows))


def drawer(name: str) -> Callable[[list[dict[str, Any]], list[str]], bytes]:
    """What draws rows in the form of a file's ending; a page has the lines of text, too.

    Raises:
        ConfigError: it needs a package that is missing. This is asked before the load, which may take hours.
    """
    from anycore.bench import plot

    if name.endswith(".svg"):
        return lambda rows, lines: plot.svg(rows).encode()
    if name.endswith(".html"):
        return lambda rows, lines: plot.page(rows, lines).encode()
    try:
        from anycore.bench import picture
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError("--plot FILE.png needs matplotlib: pip install 'anycore[plots]'", param="plot") from error
    return lambda rows, lines: picture.png(rows)


def circumstances() -> dict[str, Any]:
    """What a reader needs to repeat a run, besides the load. A key on the command line is left out."""
    words = list(sys.argv[1:])
    for place, word in enumerate(words):
        if word.startswith(("--api-key=", "--peer-api-key=")):
            words[place] = word.partition("=")[0] + "=***"
        elif place and words[place - 1] in ("--api-key", "--peer-api-key"):
            words[place] = "***"
    return {
        "anycore": __version__,
        "command": shlex.join(["anycore", *words]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def loads_of(options: argparse.Namespace) -> list[list[Load]]:
    """Every point of the sweep, with a load for each server."""
    if options.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, not {options.rounds}", param="rounds")
    if options.plot and not options.plot.endswith(PLOTS):
        raise ConfigError(f"--plot must end with {' or '.join(PLOTS)}, not {options.plot}", param="plot")
    options.url, options.peer = address(options.url, "url"), options.peer and address(options.peer, "peer")
    if options.peer == options.url:
        raise ConfigError("--peer is the same URL as --url", param="peer")
    points = []
    for rate, places in product(options.request_rate, options.max_concurrency):
        load = load_of(options, rate, places)
        sides = [load]
        if options.peer:
            there = {"url": options.peer, "api_key": options.peer_api_key}
            sides.append(replace(load, **there, model=options.peer_model or load.model))
        points.append(sides)
    return points


def load_of(options: argparse.Namespace, rate: float, places: int | None) -> Load:
    """Check the numbers and put them together."""
    at_least = {
        "num_prompts": 1,
        "prefix_len": 0,
        "vocab_size": 2,
        "num_prefixes": 1,
        "documents": 1,
        "num_warmups": 0,
        "processes": 1,
    }
    given = {**vars(options), "request_rate": rate, "max_concurrency": places}
    for name, least in {**at_least, "max_concurrency": options.processes}.items():
        value = given[name]
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}", param=name)
    for name in ("request_rate", "burstiness", "timeout", "duration"):
        if given[name] is not None and not given[name] > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {given[name]}", param=name)
    file = None if options.workload == "random" else Path(options.workload)
    if file is not None and not file.is_file():
        raise ConfigError(f"--workload {options.workload} is neither random nor a file", param="workload")
    if file is not None and options.endpoint == "rerank":
        raise ConfigError("--endpoint rerank has random documents only: leave --workload out", param="workload")
    if options.turns != (1, 1) and options.endpoint != "chat":
        raise ConfigError("--turns needs --endpoint chat: other routes have no turns", param="turns")
    load = Load(
        url=options.url,
        model=options.model,
        endpoint=options.endpoint,
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        prefix_len=options.prefix_len,
        num_prefixes=options.num_prefixes,
        turns=options.turns,
        duration=options.duration,
        vocab_size=options.vocab_size,
        documents=options.documents,
        request_rate=rate,
        burstiness=options.burstiness,
        max_concurrency=places,
        seed=options.seed,
        file=file,
        extra=options.extra_body,
        api_key=options.api_key or os.environ.get("ANYCORE_API_KEY", "").split(",")[0],
        timeout=options.timeout,
    )
    if load.number is None and places is None:
        raise ConfigError("--duration needs --request-rate or --max-concurrency, or it has no end", param="duration")
    if load.recorded and not math.isinf(rate):
        raise ConfigError("--request-rate: this --workload says itself when its requests come", param="request_rate")
    return load


def _limit(text: str) -> tuple[str, float]:
    """A name of a latency and milliseconds."""
    name, _, limit = text.partition(":")
    try:
        found = float(limit)
    except ValueError:
        found = 0.0
    if name not in LABELS or not found > 0:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(LABELS)} and milliseconds, as ttft:500, not {text!r}"
        )
    return name, found


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
