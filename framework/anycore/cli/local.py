"""What the commands that work without a server share: flags, inputs from stdin, and opening the model with progress."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from anycore.cli.flags import Parser, add_flags
from anycore.cli.progress import show_progress
from anycore.cli.settings import expand, given
from anycore.config import ModelConfig
from anycore.engine.request import SamplingParams
from anycore.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from anycore.llm import LLM

SAMPLING = {
    "temperature": (float, "randomness, 0 to 2; 0 takes the most likely token"),
    "top_p": (float, "keep the most likely tokens that together have this probability"),
    "top_k": (int, "keep this many of the most likely tokens; 0: all"),
    "min_p": (float, "keep tokens at least this share as likely as the most likely one"),
    "repetition_penalty": (float, "above 1: avoid what prompt and output hold"),
    "presence_penalty": (float, "-2 to 2: avoid what the output holds"),
    "frequency_penalty": (float, "-2 to 2: avoid what the output holds often"),
}
"""Sampling flags: type and help. They join --override-generation-config, so the model's own defaults fill the rest."""

OF_SERVERS = ("served_model_name", "max_queued", "request_timeout", "replicas", "devices", "url", "url_api_key_env")
NOT_HERE = ("model", "task", *OF_SERVERS)


def add_model_flags(parser: Parser) -> None:
    add_flags(parser, "model", ModelConfig, skip=NOT_HERE)


def add_sampling_flags(parser: Parser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling (default: the model's own)")
    for name, (kind, text) in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar="NUMBER", help=text)
    limit = "up to the model's length" if max_tokens is None else str(max_tokens)
    text = f"longest output (default: {limit})"
    group.add_argument("--max-tokens", dest="max_tokens", type=int, metavar="N", default=max_tokens, help=text)


@contextmanager
def open_model(options: argparse.Namespace, model: str, task: str) -> Iterator[LLM]:
    """Open `model` for a task; of a built-in list, the first model for it. Shows progress as long as it is open.

    Raises:
        ConfigError: the list has no model for the task, or a setting is wrong.
        BadRequest: a sampling flag is out of range.
    """
    values = {"model": model, **given(options, ModelConfig)}
    chosen = {name: vars(options).get(name) for name in (*SAMPLING, "max_tokens")}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    if sampling:
        SamplingParams(**sampling)
        values["override_generation_config"] = json.dumps(_written(values) | sampling)
    configs = expand(values)
    fitting = [config for config in configs if config.task in ("auto", task)]
    if not fitting:
        raise ConfigError(f"{model} has no model for {task}", param="model")
    config = fitting[0]
    from anycore.llm import LLM

    rest = {item.name: getattr(config, item.name) for item in fields(config) if item.name not in ("model", "task")}
    with show_progress() as progress:
        yield LLM(config.model, task=task, progress=progress, **rest)


def _written(values: dict[str, Any]) -> dict[str, Any]:
    """Return what --override-generation-config says already."""
    text = values.get("override_generation_config") or "{}"
    try:
        written = json.loads(text)
    except ValueError:
        written = None
    if not isinstance(written, dict):
        raise ConfigError(
            f"--override-generation-config must be a JSON object, not {text}", param="override_generation_config"
        )
    return written


def texts_or_stdin(texts: list[str], *, lines: bool) -> list[str]:
    """Return the texts given, else standard input: its lines, or all of it as one text.

    Raises:
        BadRequest: there is neither.
    """
    if texts:
        return texts
    if not sys.stdin.isatty():
        read = read_stdin()
        texts = [line for line in read.split("\n") if line.strip()] if lines else [read] if read else []
    if not texts:
        raise BadRequest("there is no input: give it as arguments, or on standard input")
    return texts


def read_stdin() -> str:
    """Return all of standard input, without the mark that Windows writes before UTF-8 and with plain line breaks.

    Raises:
        BadRequest: it is not UTF-8.
    """
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadRequest(
            f"standard input must be UTF-8, and line {line} is not (byte {data[error.start]:#04x}): convert it (iconv)"
        ) from None
