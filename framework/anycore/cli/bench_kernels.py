"""Times a backend's operations at a model's shapes and prints one JSON object: products, attention, norms.

No weights are read or fetched. Each row tells seconds, the bytes it has to move, its floating-point operations, and its
share of the bandwidth that a plain copy reaches on this device (above 1 where a cache helps).
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone

from anycore import __version__, plugins
from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags
from anycore.cli.settings import given
from anycore.config import ModelConfig
from anycore.errors import ConfigError

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LENGTHS = (128, 512, 1024, 2048, 4096)
REQUESTS = (1, 8, 32)


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
    parser.add_argument("--seconds", type=float, default=0.2, metavar="S", help="for each row (default: 0.2)")
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise ConfigError(f"--seconds must be above 0, not {options.seconds}", param="seconds")
    from anycore.choose import open_backend
    from anycore.engine.launch import prepare

    config = ModelConfig(**(given(options, ModelConfig) | {"model": options.model}))
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


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers above 0 such as 1,8,64, not {text!r}")
    return found
