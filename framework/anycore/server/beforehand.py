"""What `serve` refuses before it starts anything, from settings and small files alone; its --dry-run asks here, too.

Engines start to import only behind it: what few models need is imported where they do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError
from anycore.server.auth import read_keys
from anycore.server.keys import Key
from anycore.server.tls import Certificate, certificate_of


class Checked(NamedTuple):
    """What was read on the way."""

    keys: list[Key]
    secrets: list[str]  # what the log must mask
    certificate: Certificate | None


def check(config: ServerConfig, models: Sequence[ModelConfig]) -> Checked:
    """Check the settings of a server and what they name, but for its port and the models.

    Raises:
        ConfigError: naming the setting.
    """
    check_names(models)
    if config.api_servers > 1 and any(model.keep_alive is not None for model in models):
        raise ConfigError("--keep-alive works where one front serves: leave --api-servers at 1", param="keep_alive")
    for model in models:
        check_files(model)
    keys, secrets = read_keys(config)
    return Checked(keys, [*secrets, *remote_keys(models)], certificate_of(config))


def check_names(models: Sequence[ModelConfig]) -> None:
    """Refuse two models under one name."""
    seen: set[str] = set()
    if not models:
        raise ConfigError("there is no model to serve", param="model")
    for name in (name for model in models for name in model.names):
        if name in seen:
            raise ConfigError(f"the name {name!r} is used twice: set --served-model-name", param="served_model_name")
        seen.add(name)


def check_files(model: ModelConfig) -> None:
    """Check what of a model's settings is a text or a file to be read, which is read again once the model is located.

    Raises:
        ConfigError: it is not what it should be.
    """
    if model.override_generation_config is not None:
        from anycore.engine.defaults import sampling_defaults

        sampling_defaults(None, model.override_generation_config)
    if model.chat_template is not None:
        from anycore.text.template import read_template

        read_template(model.chat_template)


def remote_keys(models: Sequence[ModelConfig], environ: Mapping[str, str] = os.environ) -> list[str]:
    """The keys of other servers that models are served by.

    Raises:
        ConfigError: a variable that is to hold one is not set.
    """
    found = []
    for model in models:
        name = model.url_api_key_env
        if name is not None:
            if not environ.get(name):
                raise ConfigError(
                    f"{model.names[0]}: the variable {name} (url_api_key_env) is not set", param="url_api_key_env"
                )
            found.append(environ[name])
    return found
