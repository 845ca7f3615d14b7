"""The Ray Serve application of a settings file, for Ray's own tools: `serve run anycore.cli.ray_app:build config=FILE`.

KubeRay's RayService names it as `import_path`, with `args: {config: FILE}`. Address, port and certificate are then
those of Ray Serve's own `http_options`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from anycore.cli.settings import gather
from anycore.distributed.app import application
from anycore.errors import ConfigError
from anycore.server.auth import read_keys
from anycore.server.beforehand import check_names


def build(arguments: dict[str, str]) -> Any:
    """Make the application of `config`, the YAML file of `anycore serve --config`; keys come from where it says.

    Raises:
        ConfigError: as `anycore serve`, or there are other arguments.
    """
    if set(arguments) != {"config"}:
        raise ConfigError(f"one argument is taken, config=FILE, not {sorted(arguments)}", param="config")
    settings = gather(argparse.Namespace(config=arguments["config"]))
    check_names(settings.models)
    server = replace(settings.server, ray=settings.server.ray or "auto")  # a cluster is there, or this would not run
    keys, _ = read_keys(server)
    return application(server, settings.models, keys)
