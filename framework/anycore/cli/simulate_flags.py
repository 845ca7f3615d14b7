"""The flags of `anycore simulate`: what they take, and which of them contradict each other."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from anycore.bench.latencies import LABELS
from anycore.cli import plan
from anycore.cli.flags import Parser, add_flags, numbers, quantity
from anycore.config import ModelConfig
from anycore.errors import ConfigError

FLAGS = (*plan.FLAGS, "enable_prefix_caching", "scheduling_policy", "fair_share", "max_queued",
         "long_prompt_rows")  # fmt: skip
PLOTS = (".html", ".svg")


def add(parser: Parser) -> None:
    """Add all of them."""
    parser.add_argument("model", metavar="MODEL", help="as for serve; its weights are not fetched")
    group = parser.add_argument_group("device")
    group.add_argument("--step-times", metavar="FILE", help="what `anycore bench kernels MODEL --steps` printed there")
    group.add_argument("--bandwidth", metavar="SIZE", type=quantity,
                       help="bytes a second of the device's memory, such as 4800GB: with --flops, and without "
                       "--step-times, the least that steps can take, which is an estimate")  # fmt: skip
    group.add_argument("--flops", metavar="N", type=quantity, help="operations a second, such as 990t")
    group.add_argument("--device", dest="on", metavar="NAME",
                       help=f"{plan.DEVICE} (default: that of the step times)")  # fmt: skip
    group.add_argument("--device-memory", metavar="SIZE", type=quantity, help="that it has, such as 80GiB")
    group.add_argument("--replicas", dest="engines", type=numbers(int), default=[1], metavar="N[,N...]",
                       help="engines among which requests are divided (default: 1)")  # fmt: skip
    group.add_argument("--api-servers", type=int, default=1, metavar="N",
                       help="front processes that share the port (default: 1)")  # fmt: skip
    group.add_argument("--front-ms", type=float, metavar="MS",
                       help="milliseconds that a front is busy with each request (default: as measured with the steps, "
                       "else 0)")  # fmt: skip
    group.add_argument("--front-us", type=float, metavar="US",
                       help="microseconds that it is busy with each piece of an answer (default: as measured with the "
                       "steps, else 0)")  # fmt: skip
    group.add_argument("--delay-ms", type=float, default=0.0, metavar="MS",
                       help="milliseconds that each request takes beside that, whatever else is under way "
                       "(default: 0)")  # fmt: skip
    group.add_argument("--price-per-hour", type=float, metavar="PRICE", help="of one device")
    add_load(parser)
    group = parser.add_argument_group("what is asked")
    group.add_argument("--slo", "--goodput", dest="slo", type=limits, action="extend", nargs="+", default=[],
                       metavar="NAME:MS", help="limits, such as ttft:500 itl:50; also tpot and e2el")  # fmt: skip
    group.add_argument("--find-replicas", action="store_true", help="search for the fewest engines that keep them")
    group.add_argument("--attain", type=float, default=0.99, metavar="SHARE",
                       help="share of the requests that must be within the limits then (default: 0.99)")  # fmt: skip
    group.add_argument("--steady", action="store_true",
                       help="each step takes its median; without, as much more or less as was measured")  # fmt: skip
    group.add_argument("--processes", type=int, metavar="N", help="points of a sweep at a time (default: the cores)")
    group.add_argument("--format", choices=("table", "json"), default="table", help="how to print it (default: table)")
    group.add_argument("--plot", metavar="FILE.html|.svg", help="draw the figures; of a sweep over its points")
    add_flags(parser, "as for serve", ModelConfig, skip=[name for name in ModelConfig.__slots__ if name not in FLAGS])


def add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--workload", "--trace", dest="workload", metavar="random|FILE", default="random",
                       help="random requests; or a file with a JSON object a line, in order of arrival: at (seconds), "
                       "prompt (ids), max_tokens; or timestamp (ms), input_length, output_length and perhaps hash_ids; "
                       "perhaps priority and tenant (default: random)")  # fmt: skip
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="a file's times are divided by this")
    group.add_argument("--request-rate", "--rate", dest="request_rate", type=numbers(float), default=[math.inf],
                       metavar="R[,R...]", help="requests a second (default: inf, all at once)")  # fmt: skip
    group.add_argument("--burstiness", type=float, default=1.0, metavar="B",
                       help="1: Poisson arrivals; less comes in bursts, more comes evenly (default: 1)")  # fmt: skip
    group.add_argument("--max-concurrency", type=numbers(int), default=[None], metavar="C[,C...]",
                       help="requests, or conversations, open at once (default: no limit)")  # fmt: skip
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N",
                       help="requests, or conversations (default: 1000; of a file: all of it)")  # fmt: skip
    group.add_argument("--input-len", type=span, default=(100, 1024), metavar="N|MIN:MAX",
                       help="tokens of a prompt (default: 100:1024)")  # fmt: skip
    group.add_argument("--output-len", type=span, default=(100, 1024), metavar="N|MIN:MAX",
                       help="tokens of an answer (default: 100:1024)")  # fmt: skip
    group.add_argument("--prefix-len", type=int, default=0, metavar="N", help="tokens before them that prompts share")
    group.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="different ones of these (default: 1)")
    group.add_argument("--turns", type=span, default=(1, 1), metavar="N|MIN:MAX",
                       help="requests of a conversation, each with what was said before (default: 1)")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that make no sense, and flags that contradict each other."""
    options.slo = [pair for word in options.slo for pair in word]
    least = {"num_prompts": 1, "prefix_len": 0, "num_prefixes": 1, "processes": 1, "api_servers": 1}
    least |= dict.fromkeys(("front_ms", "front_us", "delay_ms", "price_per_hour"), 0)
    for name, value in {name: getattr(options, name) for name in least}.items():
        if value is not None and not least[name] <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least[name]}, not {value}", param=name)
    for name in ("request_rate", "engines", "max_concurrency", "burstiness", "speed", "bandwidth", "flops"):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value > 0:
                word = "replicas" if name == "engines" else name.replace("_", "-")
                raise ConfigError(f"--{word} must be above 0, not {value}", param=name)
    if not 0 < options.attain <= 1:
        raise ConfigError(f"--attain is a share of the requests, above 0 and at most 1, not {options.attain}",
                          param="attain")  # fmt: skip
    if options.find_replicas and not options.slo:
        raise ConfigError("--find-replicas needs limits, such as --slo ttft:500 itl:50", param="slo")
    if options.find_replicas and options.engines != [1]:
        raise ConfigError("--find-replicas searches for their number: leave --replicas out", param="replicas")
    if options.plot and not options.plot.endswith(PLOTS):
        raise ConfigError(f"--plot must end with {' or '.join(PLOTS)}, not {options.plot}", param="plot")
    if options.workload != "random":
        if not Path(options.workload).is_file():
            raise ConfigError(f"--workload {options.workload} is neither random nor a file", param="workload")
        if options.request_rate != [math.inf]:
            raise ConfigError("--request-rate: a file says itself when its requests come (--speed changes that)",
                              param="request_rate")  # fmt: skip


def span(text: str) -> tuple[int, int]:
    """A number, or the least and the greatest one."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"must be a number such as 128, or a range such as 100:1024, not {text!r}")
    return found


def limits(text: str) -> list[tuple[str, float]]:
    """Names of latencies and milliseconds."""
    found = []
    for word in text.split(","):
        name, _, limit = word.partition(":")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)?", limit)
        if name not in LABELS or not match or not float(match[1]) > 0:
            raise argparse.ArgumentTypeError(
                f"must be one of {', '.join(LABELS)} and milliseconds, as ttft:500 or ttft:500ms, not {word!r}"
            )
        found.append((name, float(match[1]) * (1000 if match[2] == "s" else 1)))
    return found
