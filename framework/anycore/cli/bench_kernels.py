"""Times a backend's operations at a model's shapes and prints one JSON object: products, attention, norms.

No weights are read or fetched. Each row tells seconds, the bytes it has to move, its floating-point operations, and its
share of the bandwidth that a plain copy reaches on this device (above 1 where a cache helps).

With --steps it loads the model and times whole steps of the engine instead, and then what the server's front is busy
with: what `anycore simulate` predicts from.
"""

from __future__ import annotations

import argparse
import json
import logging
from datetime import datetime, timezone

from anycore import __version__, plugins
from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags
from anycore.cli.progress import show_progress
from anycore.cli.settings import given
from anycore.config import ModelConfig
from anycore.errors import AnycoreError, ConfigError

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTHS = (128, 512, 1024, 2048, 4096)
REQUESTS = (1, 8, 32)
FRONT_SECONDS = 0.1  # of each kind of step, from which on the front is measured twice, too

log = logging.getLogger(__name__)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id, modelscope:ID or pkg:NAME")
    for name, values, text in (
        ("rows", ROWS, "rows that matrices are multiplied by"),
        ("lengths", LENGTHS, "tokens that attention looks back on"),
        ("requests", REQUESTS, "requests that attend at once"),
    ):
        shown = ",".join(map(str, values))
        parser.add_argument(f"--{name}", type=_numbers, default=values, metavar="N[,N...]",
                            help=f"{text} (default: {shown})")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=0.2, metavar="S",
                        help="for each row, or each kind of step (default: 0.2)")  # fmt: skip
    parser.add_argument("--steps", action="store_true",
                        help="whole steps, with the model's weights: the file for anycore simulate --step-times; how "
                        "many requests, how long ones and how long chunks follows from the model's limits")  # fmt: skip
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, not {options.seconds}", param="seconds")
    config = ModelConfig(**(given(options, ModelConfig) | {"model": options.model}))
    return whole_steps(config, options.seconds) if options.steps else operations(config, options)


def operations(config: ModelConfig, options: argparse.Namespace) -> int:
    """Time one operation after the other."""
    from anycore.choose import open_backend
    from anycore.engine.launch import prepare

    prepared = prepare(config, plugins.load(), weights=False)
    wish = prepared.wish
    import torch

    from anycore.bench.kernels import Bench

    if config.threads:
        torch.set_num_threads(config.threads)
    with torch.inference_mode():
        backend = open_backend(prepared.choice)
        bench = Bench(backend, prepared.spec, wish.dtype, wish.quantization, options.seconds)
        rows = [
            *bench.products(options.rows),
            *bench.elementwise(options.rows),
            *bench.attention(options.requests, options.lengths, wish.block_size if wish.paged else 0),
        ]
    about = {
        "anycore": __version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": options.model,
        "architecture": prepared.spec.architecture,
        "layers": prepared.spec.layers,
        "backend": backend.name,
        "device": prepared.choice.device.name,
        "threads": torch.get_num_threads(),
        "dtype": wish.dtype,
        "quantization": wish.quantization.scheme if wish.quantization else None,
        "block_size": wish.block_size if wish.paged else None,
        "copy_bytes_s": bench.bandwidth,
    }
    print(json.dumps(about | {"operations": rows}))
    backend.close()
    return 0


def whole_steps(config: ModelConfig, seconds: float) -> int:
    """Time steps of a loaded engine."""
    from anycore.engine.defaults import sampling_defaults
    from anycore.engine.launch import build, prepare

    prepared = prepare(config, plugins.load())
    engine = build(prepared)
    import msgspec

    from anycore.engine.request import SamplingParams
    from anycore.simulate.measure import Meter, record

    file = prepared.source.read_object("generation_config.json")
    defaults = sampling_defaults(file, config.override_generation_config, config.generation_config).values
    sampling = SamplingParams(**(defaults | {"max_tokens": None, "ignore_eos": True}))  # as servers sample by default
    with show_progress() as progress:
        steps = Meter(engine, sampling, seconds).run(lambda done, of: progress("measure steps", done / of))
        found = record(prepared, engine, sampling, steps)
        engine.runner.backend.close()
        from anycore.cli import front_times

        progress("measure the front", 0.0)
        try:
            front = front_times.measure(prepared, 1 if seconds < FRONT_SECONDS else 2)
            found = msgspec.structs.replace(found, front=front)
        except AnycoreError as error:  # such as a model that cannot be served for want of a tokenizer
            log.warning("what the front takes is not in the file, give --front-ms to simulate: %s", error.message)
    print(msgspec.json.encode(found).decode())
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers above 0 such as 1,8,64, not {text!r}")
    return found
