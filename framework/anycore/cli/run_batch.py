"""Answers a file of requests in OpenAI's batch format with the routes of `serve`, and without a port.

A run that was killed goes on when the same command is given again: what the output holds is not asked a second time.
The exit code is 0 when every line is answered and none of the answers is an error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from anycore.cli.flags import Once, Parser, add_flags
from anycore.cli.progress import show_progress
from anycore.cli.settings import gather
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError

KEPT = ("max_body_size", "max_request_sequences", "strict", "log_prompts", "allow_request_template", "log_level")
"""The server's settings that mean something without a port."""

FILES = {
    "input_file": ("IN.jsonl", "-i", "a request a line: custom_id, method, url, body"),
    "output_file": ("OUT.jsonl", "-o", "an answer a line, in any order; what is there already is kept"),
}


def add_arguments(parser: Parser) -> None:
    for name, (metavar, letter, text) in FILES.items():
        spelling = "--" + name.replace("_", "-")
        options = {"action": Once, "metavar": metavar, "default": argparse.SUPPRESS, "help": text}
        parser.add_argument(name, nargs="?", **options)  # type: ignore[arg-type]
        parser.add_argument(letter, spelling, dest=name, **options)  # type: ignore[arg-type]
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings, such as several models")
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="lines asked at once (default: twice what the engines run)"
    )
    add_flags(parser, "model", ModelConfig)
    add_flags(parser, "server", ServerConfig, skip=[f.name for f in fields(ServerConfig) if f.name not in KEPT])


def run(options: argparse.Namespace) -> int:
    for name, (metavar, letter, _) in FILES.items():
        if not hasattr(options, name):
            raise ConfigError(f"name the file {metavar}, by its place or with {letter}", param=name)
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError(
            f"--max-concurrency must be at least 1, not {options.max_concurrency}", param="max_concurrency"
        )
    settings = gather(options)
    from anycore.batch.run import run_batch

    with show_progress() as progress:
        outcome = run_batch(
            Path(options.input_file),
            Path(options.output_file),
            settings.server,
            settings.models,
            max_concurrency=options.max_concurrency,
            progress=progress,
        )
    print(
        f"anycore: {options.output_file} answers {outcome.answered} of {outcome.total} lines, "
        f"{outcome.failed} of them with errors"
    )
    if outcome.stopped:
        missing = outcome.total - outcome.answered
        print(
            f"anycore: stopped: {outcome.stopped}. {missing} lines are missing; the same command goes on with them",
            file=sys.stderr,
        )
    return outcome.code if outcome.stopped else int(outcome.failed > 0)
