"""Says what memory a model takes on a device, how its settings trade, and what to change if it does not fit.

It reads config.json and the small files beside it: weights are never fetched, and the device need not be here. Several
models are planned to share it. The numbers are those that the model would start with. Exits with 0 if it fits, 3 if
it does not.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from anycore import plugins
from anycore.cli.flags import Parser, add_flags, quantity
from anycore.cli.settings import expand, given
from anycore.config import ModelConfig, flag
from anycore.engine import planning
from anycore.engine.launch import Prepared
from anycore.engine.memory import size
from anycore.engine.planning import Asked
from anycore.errors import ConfigError, DoesNotFit
from anycore.plugins import Plugins

FLAGS = (
    "task", "backend", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "memory_utilization", "kv_cache_memory", "pooling", "revision", "quantization", "kv_cache_dtype",
    "tensor_parallel_size",
)  # fmt: skip
"""Settings of a model that matter to its memory."""


DEVICE = "a device by its name, such as h200, 4090, 910b or cpu, or the index of one that is here"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="as for serve; several share the device")
    parser.add_argument("--device", dest="on", metavar="NAME", help=DEVICE)
    parser.add_argument("--device-memory", metavar="SIZE", type=quantity, help="that it has, such as 80GiB")
    parser.add_argument("--concurrency", metavar="N", type=int, help="sequences that must fit at once, --context each")
    parser.add_argument("--context", metavar="N", type=quantity, help="tokens of each (as --max-model-len)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="how to print it (default: table)")
    add_flags(parser, "as for serve", ModelConfig, skip=[name for name in ModelConfig.__slots__ if name not in FLAGS])


def run(options: argparse.Namespace) -> int:
    everywhere = plugins.load()
    configs = settings(options)
    ranks = max(config.tensor_parallel_size for config in configs)
    found = planning.on_device(everywhere, configs[0].backend, options.on, options.device_memory, ranks)
    asked = [planning.read(config, found, options.concurrency) for config in configs]
    try:
        if len(asked) > 1:
            asked = planning.share(asked)
    except DoesNotFit as error:
        print(json.dumps({"fits": False, "reason": error.message}, indent=2) if options.format == "json" else error)
        return 3
    reports = [report(one, everywhere) for one in asked]
    if options.format == "json":
        print(json.dumps(reports[0] if len(reports) == 1 else {"models": reports}, indent=2))
    else:
        print("\n\n".join("\n".join(text(one)) for one in reports))
    return 0 if all(one["fits"] for one in reports) else 3


def settings(options: argparse.Namespace) -> list[ModelConfig]:
    """The settings of every model: flags hold for all of them."""
    values = given(options, ModelConfig)
    if options.concurrency is not None and options.concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, not {options.concurrency}", param="concurrency")
    if options.context is not None and values.setdefault("max_model_len", options.context) != options.context:
        raise ConfigError("--context and --max-model-len are the same setting: give one", param="context")
    if options.on is not None and re.fullmatch(r"\d\d?", options.on):
        values["device"], options.on = int(options.on), None
    return [config for model in options.models for config in expand({**values, "model": model})]


def report(asked: Asked, everywhere: Plugins) -> dict[str, Any]:
    """All that is known about one model, as plain data."""
    try:
        made = asked.fit()
    except DoesNotFit as error:
        advice = [asdict(one) for one in planning.advice(asked, everywhere)]
        return {"model": asked.config.model, "fits": False, "reason": error.message, "advice": advice}
    assert made.plan is not None
    plan = made.plan
    share = {"memory_utilization": made.wish.utilization} if made.wish.kv_cache_memory is None else {}
    return {
        "model": asked.config.model,
        "fits": True,
        **whom(made),
        "limits": {**asdict(plan.limits), **share},
        "budget": plan.budget,
        "used": plan.used,
        "terms": plan.terms,
        "formulas": planning.formulas(made),
        "bytes_per_token": plan.kv_token_bytes,
        "bytes_per_sequence": plan.kv_token_bytes * plan.limits.max_model_len,
        "cache_tokens": max(0, plan.limits.blocks - 1) * plan.limits.block_size,
        "most_sequences_at_once": planning.most_at_once(asked),
        "knobs": planning.knobs(made),
        "settings": {name: profile(*one) for name, one in planning.profiles(asked).items()},
    }


def whom(made: Prepared) -> dict[str, Any]:
    device = made.choice.device
    return {
        "architecture": made.spec.architecture,
        "task": made.task.value,
        "backend": made.choice.spec.name,
        "level": made.choice.support.level.value,
        "ranks": made.config.tensor_parallel_size,
        "device": {"name": device.name, "chip": device.chip, "memory": device.memory},
        "dtype": made.wish.dtype,
        "kv_cache_dtype": (made.wish.kv_cache or made.wish.dtype) if made.wish.paged else None,
    }


def profile(flags: dict[str, int], made: Prepared) -> dict[str, Any]:
    assert made.plan is not None
    limits = made.plan.limits
    words = " ".join(f"{flag(name)} {value}" for name, value in flags.items())
    tokens = max(0, limits.blocks - 1) * limits.block_size
    return {"flags": words, **asdict(limits), "cache_tokens": tokens, "used": made.plan.used}


# --- text ---------------------------------------------------------------------------------------------------------


def text(report: dict[str, Any]) -> list[str]:
    """The report as lines."""
    if not report["fits"]:
        lines = [f"{report['model']} does not fit: {report['reason']}"]
        lines += ["what would:"] if report["advice"] else ["no single setting would change that"]
        return [*lines, *(f"  {one['text']:32} {size(one['used'])} used" for one in report["advice"])]
    device, limits = report["device"], report["limits"]
    each = f", each of {report['ranks']} ranks" if report["ranks"] > 1 else ""
    lines = [
        f"{report['model']}: {report['architecture']}, {report['task']} in {report['dtype']} on {device['name']}{each} "
        f"({report['backend']}, {report['level']}, {size(device['memory'])})",
        "",
        *columns(
            [(name, size(number), report["formulas"][name]) for name, number in report["terms"].items() if number]
        ),
        *columns([("used", size(report["used"]), f"of {size(report['budget'])} allowed")]),
        "",
    ]
    if report["bytes_per_token"]:
        lines += [
            f"cache: {report['cache_tokens']} tokens in {report['kv_cache_dtype']}, "
            f"{report['bytes_per_token']} bytes each; "
            f"a sequence of {limits['max_model_len']} tokens takes {size(report['bytes_per_sequence'])}",
            f"at once: {limits['max_num_seqs']} sequences of any length, "
            f"{report['most_sequences_at_once']} if each has {limits['max_model_len']} tokens",
        ]
    else:
        lines.append(
            f"no cache: inputs of up to {limits['max_model_len']} tokens are computed in one piece, "
            f"{limits['max_num_batched_tokens']} tokens a step"
        )
    if "memory_utilization" in limits:
        lines.append(f"share of the device: --memory-utilization {limits['memory_utilization']:g}")
    lines += ["", "what a change costs (-: gives)", *columns([knob(*entry) for entry in report["knobs"].items()])]
    lines += ["", "settings that fit", *columns([setting(*entry) for entry in report["settings"].items()])]
    return lines


def knob(name: str, cost: dict[str, int]) -> tuple[str, str, str]:
    tokens = f"{cost['tokens']} tokens of cache" if cost.get("tokens") else ""
    return name, size(cost["bytes"]), tokens


def setting(name: str, one: dict[str, Any]) -> tuple[str, str, str]:
    length = one["max_model_len"]
    if not one["cache_tokens"]:
        return name, size(one["used"]), f"{one['flags']} (inputs up to {length} tokens)"
    count = min(one["max_num_seqs"], one["cache_tokens"] // length)
    return name, size(one["used"]), f"{one['flags']} ({one['cache_tokens']} tokens of cache, {count} x {length})"


def columns(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    wide = max([32, *(len(row[0]) for row in rows)])
    return [f"  {name:{wide}} {number:>12}  {rest}".rstrip() for name, number, rest in rows]
