"""Puts settings together for commands: defaults, then a YAML file, then the command line, each key checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from anycore.cli.flags import convert, kind_of, nearest, spellings
from anycore.config import OF_REMOTE, ModelConfig, ServerConfig, shown
from anycore.errors import ConfigError
from anycore.models.catalog import CATALOG


@dataclass(frozen=True, slots=True)
class Settings:
    """What `anycore serve` starts: a server and its models."""

    server: ServerConfig
    models: tuple[ModelConfig, ...]
    server_from: dict[str, str] = field(default_factory=dict)  # field -> "flag", "file", "environment"
    models_from: tuple[dict[str, str], ...] = ()  # of each model; "list": a built-in list's own


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A YAML file as field values; `model` holds the defaults of all models, or the only model."""

    server: dict[str, Any]
    model: dict[str, Any]
    models: tuple[dict[str, Any], ...]
    wheres: tuple[Where, ...] = ()  # of each of `models`


@dataclass(frozen=True, slots=True)
class Where:
    """A part of a file, for messages: which it is, and in which line each of its keys stands."""

    path: Path
    part: str = ""
    first: int = 1
    lines: dict[str, int] = field(default_factory=dict)

    def __call__(self, key: object = None) -> str:
        """What a message about a key begins with; a key that stands nowhere is missing from the whole."""
        line = self.lines.get(str(key), self.first)
        return f"{self.path}:{line}: {self.part}"


def gather(options: argparse.Namespace) -> Settings:
    """Combine the flags that were given with the file named by --config.

    Raises:
        ConfigError: a key or value is wrong, or no model is named.
    """
    path = getattr(options, "config", None)
    file = read_file(Path(path)) if path else SettingsFile({}, {}, ())
    level = {"log_level": os.environ["ANYCORE_LOG"].lower()} if os.environ.get("ANYCORE_LOG") else {}
    server = ServerConfig(**{**level, **file.server, **given(options, ServerConfig)})
    flags = given(options, ModelConfig)
    if file.models and flags.get("model"):
        raise ConfigError(f"give MODEL on the command line or models: in {path}, not both", param="model")
    models: list[ModelConfig] = []
    origins: list[dict[str, str]] = []
    for number, entry in enumerate(file.models or ({},)):
        said = {**dict.fromkeys({**file.model, **entry}, "file"), **dict.fromkeys(flags, "flag")}
        values = {**_meant(entry, file.model), **entry, **_meant(entry, flags)}
        where = file.wheres[number] if file.models else None
        for model in expand(values, where):
            models.append(model)
            origins.append(said if model.model == values["model"] else {**dict.fromkeys(shown(model), "list"), **said})
    if len(models) > 1 and "served_model_name" in flags:
        raise ConfigError(
            f"--served-model-name names one model, and there are {len(models)}: "
            "name each under models: in a --config file",
            param="served_model_name",
        )
    words = given(options, ServerConfig)
    by = (dict.fromkeys(level, "environment"), dict.fromkeys(file.server, "file"), dict.fromkeys(words, "flag"))
    return Settings(server, tuple(models), {**by[0], **by[1], **by[2]}, tuple(origins))


def _meant(entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings for all models that mean something for one: few do for a model of another server."""
    return {name: value for name, value in defaults.items() if "url" not in entry or name in OF_REMOTE}


def given(options: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """Return the fields of `config` that the command line sets."""
    found = vars(options)
    values = {item.name: found[item.name] for item in fields(config) if item.name in found}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def expand(values: Mapping[str, Any], where: Where | None = None) -> list[ModelConfig]:
    """Make the configuration of one model, or of each model of a built-in list such as `demo`."""
    if not values.get("model"):
        begin = where() if where else ""
        raise ConfigError(f"{begin}no model is named: give MODEL, or model: in a --config file", param="model")
    try:
        if values["model"] in CATALOG:
            rest = {name: value for name, value in values.items() if name != "model"}
            return [replace(config, **rest) for config in CATALOG[values["model"]]]
        return [ModelConfig(**values)]
    except ConfigError as error:
        raise ConfigError((where(error.param) if where else "") + error.message, param=error.param) from error


def read_file(path: Path) -> SettingsFile:
    """Read and check a YAML file. Keys are names of fields or flags; `models:` lists several models.

    Raises:
        ConfigError: naming the file, the key and, for a misspelt one, the nearest right key.
    """
    data, lines = _load(path)
    whole = Where(path, lines={str(key): line for (key, *rest), line in lines.items() if not rest})
    entries = data.pop("models", None)
    if entries is not None and not (isinstance(entries, list) and entries):
        raise ConfigError(f"{whole('models')}models: must be a list with at least one model", param="models")
    server_keys, model_keys = _keys(ServerConfig), _keys(ModelConfig)
    for key in data:
        if key not in server_keys and key not in model_keys:
            hint = nearest(str(key), ["models", *server_keys, *model_keys])
            raise ConfigError(f"{whole(key)}there is no setting {key!r}{hint}", param=str(key))
    server = _values({k: v for k, v in data.items() if k in server_keys}, ServerConfig, whole)
    model = _values({k: v for k, v in data.items() if k in model_keys}, ModelConfig, whole)
    if entries and model.keys() & {"model", "served_model_name"}:
        raise ConfigError(f"{whole('model')}model and served_model_name belong to each entry of models:", param="model")
    if entries and model.keys() & {"url", "url_api_key_env"}:
        raise ConfigError(f"{whole('url')}url and url_api_key_env belong to entries of models:", param="url")
    models, wheres = [], []
    for number, entry in enumerate(entries or ()):
        inside = {str(keys[2]): line for keys, line in lines.items() if keys[:2] == ("models", number) and keys[2:]}
        where = Where(path, f"models[{number}]: ", lines[("models", number)], inside)
        if not isinstance(entry, dict):
            raise ConfigError(f"{where()}must be a mapping such as `model: NAME`, not {entry!r}", param="models")
        for key in entry.keys() - model_keys.keys():
            hint = "; it belongs to the top level" if key in server_keys else nearest(str(key), model_keys)
            raise ConfigError(f"{where(key)}there is no setting {key!r}{hint}", param=str(key))
        models.append(_values(entry, ModelConfig, where))
        named = {model_keys[key]: line for key, line in inside.items()}  # as ModelConfig calls them
        wheres.append(replace(where, lines=named))
    return SettingsFile(server, model, tuple(models), tuple(wheres))


def _keys(config: type[Any]) -> dict[str, str]:
    """Return every spelling of every field: max_num_seqs, max-num-seqs and the aliases of its flag."""
    keys = {}
    for item in fields(config):
        for name in (item.name, *(spelling.removeprefix("--") for spelling in spellings(item))):
            keys[name] = keys[name.replace("-", "_")] = item.name
    return keys


def _values(data: Mapping[str, Any], config: type[Any], where: Where) -> dict[str, Any]:
    """Turn the YAML values of known keys into field values."""
    keys = _keys(config)
    items = {item.name: item for item in fields(config)}
    out: dict[str, Any] = {}
    for key, value in data.items():
        item = items[keys[key]]
        if item.name in out:
            raise ConfigError(f"{where(key)}{key} sets {item.name} a second time", param=item.name)
        if value is None and item.default is None:
            continue
        try:
            out[item.name] = convert(item, kind_of(config, item), value)
        except ValueError as error:
            raise ConfigError(f"{where(key)}{key}: {error}", param=item.name) from error
    return out


def _load(path: Path) -> tuple[dict[Any, Any], dict[tuple[Any, ...], int]]:
    """Read a YAML mapping in which no key appears twice; also the line of each key and of each entry of a list."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: list[Any] = []
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise ConfigError(f"{path}:{line}: {key} is set twice", param=str(key))
                seen.append(key)
            return super().construct_mapping(node, deep=deep)

    try:
        text = path.read_text(encoding="utf-8")
        lines = dict(_lines(yaml.compose(text, Loader)))
        data = yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}", param="config") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply, or holds itself", param="config") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold settings such as `port: 8000`", param="config")
    return data, lines


def _lines(node: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the path to each key and entry under a node of YAML, and its line."""
    pairs: list[tuple[Any, Any, Any]] = []
    if node is not None and node.id == "mapping":
        pairs = [(key.value, key, value) for key, value in node.value]
    elif node is not None and node.id == "sequence":
        pairs = [(number, value, value) for number, value in enumerate(node.value)]
    for name, at, value in pairs:
        yield (*place, name), at.start_mark.line + 1
        yield from _lines(value, (*place, name))
