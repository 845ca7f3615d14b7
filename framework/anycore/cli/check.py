"""Says whether a model can be served, by which backend, and if not, why and what is the least that has to change.

It reads config.json and the small files beside it: weights are never fetched, and no backend's libraries are imported.
Where a backend has no device here, or with --chip, its table answers for a device that is assumed; without --backend,
those that name the chip. Exits with 0 for yes (one backend can), 3 for no. How much memory a model takes is another
question: anycore plan.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from anycore import plugins
from anycore.answers import Question, read, sentence
from anycore.ask import Report, check
from anycore.cli.flags import Parser, add_flags
from anycore.cli.settings import given
from anycore.config import ModelConfig
from anycore.contract.declare import FEATURES

FLAGS = (
    "task", "backend", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "revision", "tensor_parallel_size",
)  # fmt: skip
"""Settings of a model that matter to the answer."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, GGUF file, hub id, modelscope:ID or pkg:NAME, as for serve"
    )
    parser.add_argument("--chip", metavar="NAME", help="this kind of device, whether it is here or not, such as 910B")
    parser.add_argument("--features", metavar="A,B", default="", help=f"what else it must do: {', '.join(FEATURES)}")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print it (default: text)")
    others = [item.name for item in fields(ModelConfig) if item.name not in FLAGS]
    add_flags(parser, "as for serve", ModelConfig, skip=others)


def run(options: argparse.Namespace) -> int:
    loaded = plugins.load()
    chosen = {name: value for name, value in given(options, ModelConfig).items() if value != "auto"}
    features = tuple(name.strip() for name in options.features.split(",") if name.strip())
    question = Question(**chosen, chip=options.chip, features=features)
    report = check(question, loaded, read(question, loaded))
    if options.format == "json":
        failures = [str(failure) for failure in loaded.failures]
        print(json.dumps({**report.as_dict(), "failures": failures}, indent=2))
    else:
        print("\n".join([*text(report), *map(str, loaded.failures)]))
    return 0 if report.supported else 3


def text(report: Report) -> list[str]:
    """Return the answers as lines: the verdict, then each backend with its row, or its reasons and alternatives."""
    about = f"{report.question.model}"
    if report.architecture:
        about += f" ({report.architecture}; can {', '.join(report.possible_tasks)})"
    lines = [f"{'yes' if report.supported else 'no'}: {about}"]
    for found in report.answers:
        lines.append(f"  {sentence(found)}")
        if found.absent and not found.device:
            lines.append(f"    assumed: {' '.join(found.absent.split())}")
        if found.row is not None and found.row.note:
            lines.append(f"    note: {found.row.note}")
        # Rows that differ in chips alone read the same.
        lines += dict.fromkeys(f"    - {row}: {reason}" for row, reason in found.reasons)
        if found.alternatives:
            lines.append("    the least that would have to change:")
        for number, other in enumerate(found.alternatives, 1):
            lines.append(f"      {number}. {', '.join(other.changes)} ({other.backend}, {other.level})")
    return lines
