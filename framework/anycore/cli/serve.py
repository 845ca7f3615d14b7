"""Serves one model, the built-in list `demo`, or the models of a YAML file, on one port.

A file's keys are the names of these flags; `models:` holds a list, each entry with its own settings, and settings
beside it are defaults for all. The command line wins.
"""

from __future__ import annotations

import argparse
import json
import logging

from anycore.cli.flags import Once, Parser, add_flags
from anycore.cli.progress import show_progress
from anycore.cli.settings import gather
from anycore.config import ModelConfig, ServerConfig, shown
from anycore.distributed.settings import check
from anycore.ranks import meeting
from anycore.server import logs
from anycore.server.beforehand import check_names
from anycore.server.run import serve

log = logging.getLogger(__name__)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        action=Once,
        default=argparse.SUPPRESS,
        help="demo, or a folder, GGUF file, hub id, modelscope:ID or pkg:NAME",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--dry-run", action="store_true", help="print every effective setting and who decided it; start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: as JSON")
    add_flags(parser, "model", ModelConfig)
    add_flags(parser, "server", ServerConfig)


def run(options: argparse.Namespace) -> int:
    settings = gather(options)
    check_names(settings.models)
    check(settings.server, settings.models)
    if options.dry_run:
        from anycore import plugins
        from anycore.cli import dry_run

        report = dry_run.effective(settings, plugins.load())
        print(json.dumps(report, indent=2) if options.json else "\n".join(dry_run.text(report)))
        return 0
    met = meeting.from_environment()
    if met is not None and met.rank > 0 and any(model.tensor_parallel_size > 1 for model in settings.models):
        from anycore.ranks import follower

        return follower.main(met)  # torchrun starts the same command for every rank, of which the first one serves
    logs.of_server(settings.server, settings.server.api_key)
    log.info("server: %s", shown(settings.server) or "defaults")
    for model in settings.models:
        log.info("model: %s", shown(model))
    if settings.server.ray is not None:
        from anycore.distributed.run import serve as serve_on_cluster

        return serve_on_cluster(settings.server, settings.models)
    with show_progress() as progress:
        return serve(settings.server, settings.models, progress=progress)
