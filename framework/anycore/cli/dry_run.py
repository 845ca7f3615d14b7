"""What `anycore serve --dry-run` prints: every effective setting, who decided it, and what was adjusted and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from anycore.cli.settings import Settings
from anycore.config import OF_REMOTE, ModelConfig, ServerConfig
from anycore.distributed.settings import need_ray
from anycore.engine.launch import Prepared, prepare
from anycore.plugins import Plugins
from anycore.server.beforehand import check
from anycore.server.run import open_port


def effective(settings: Settings, plugins: Plugins) -> dict[str, Any]:
    """Check and prepare all as `serve` does, without fetching weights or opening a device; return it as plain data.

    Raises:
        AnycoreError: `serve` would refuse it, or --strict refuses an adjustment.
    """
    from anycore.server.state import reading_of  # heavy imports

    check_server(settings.server, settings.models, plugins)
    models = []
    for config, origins in zip(settings.models, settings.models_from, strict=True):
        if config.url is not None:
            models.append(remote(config, origins))
            continue
        devices = dict.fromkeys(config.placement)
        each = {
            device: prepare(
                replace(config, device=device, devices=()), plugins, strict=settings.server.strict, weights=False
            )
            for device in devices
        }
        first = each[config.placement[0]]
        reading_of(config, first.source, first.card()["max_model_len"], plugins, settings.server.allow_request_template)
        placement = [place(each[device], device) for device in config.placement]
        models.append({**model(first, origins), "placement": placement})
    if settings.server.ray is None:  # which listens by itself
        open_port(settings.server).close()  # last: a port in use need not mean that anything else is wrong
    return {"server": chosen(settings.server, settings.server_from), "models": models}


def check_server(config: ServerConfig, models: Sequence[ModelConfig], plugins: Plugins) -> None:
    """Refuse what `serve` would refuse before it looks at a model, or could not do for want of a package."""
    from anycore.server.turns import check_tools

    check(config, models)
    check_tools(config.run_tools, plugins)
    if config.otlp_traces_endpoint is not None:
        from anycore.server.tracing import exporter_of

        exporter_of(config.otlp_traces_endpoint).shutdown()
    if config.ray is not None:
        need_ray()
    if any(model.url is not None for model in models):
        import anycore.server.remote  # noqa: F401  (says which package is missing)


def place(prepared: Prepared, device: int) -> str:
    """Where one engine will run."""
    return f"{prepared.choice.spec.name} {device}: {prepared.choice.device.name}"


def remote(config: ModelConfig, origins: dict[str, str]) -> dict[str, Any]:
    """A model of another server, which is not asked."""
    return {
        "model": config.names[0],
        "architecture": "remote: not checked",
        "device": config.url,
        "placement": [f"remote: {config.url}"],
        "planned": True,
        "settings": [entry for entry in chosen(config, origins) if entry["name"] in OF_REMOTE],
        "adjusted": (),
    }


def model(prepared: Prepared, origins: dict[str, str]) -> dict[str, Any]:
    """One model: what was decided about it, then the settings that stand as they were given."""
    decided = {decision.name: msgspec.to_builtins(decision) for decision in prepared.decisions}
    for name, entry in decided.items():
        if entry["by"] == "flag":  # the engine cannot tell one from a file
            entry["by"] = origins.get(name, "flag")
    given = chosen(prepared.config, origins)
    return {
        "model": prepared.config.names[0],
        "architecture": prepared.spec.architecture,
        "device": prepared.choice.device.name,
        "planned": prepared.plan is not None,
        "settings": [*decided.values(), *(entry for entry in given if entry["name"] not in decided)],
        "adjusted": prepared.adjustments,
    }


def chosen(config: Any, origins: dict[str, str]) -> list[dict[str, Any]]:
    """The fields of a configuration that have a value, secrets as ***."""
    entries = []
    for item in fields(config):
        value = getattr(config, item.name)
        if value in (None, ()):
            continue
        shown = "***" if item.metadata["secret"] else value
        entries.append({"name": item.name, "value": shown, "by": origins.get(item.name, "default"), "why": ""})
    return entries


def text(report: dict[str, Any]) -> list[str]:
    """The same as lines."""
    lines = ["server", *(f"  {line(entry)}" for entry in report["server"])]
    for served in report["models"]:
        lines += ["", f"model {served['model']}: {served['architecture']} on {served['device']}"]
        lines += [f"  engine {number}: {where}" for number, where in enumerate(served["placement"])]
        lines += [f"  {line(entry)}" for entry in served["settings"]]
        if not served["planned"]:
            lines.append("  the device tells its memory when it is open: lengths and counts are settled then")
        lines.append("  adjusted:" if served["adjusted"] else "  adjusted: nothing")
        lines += [f"    - {words}" for words in served["adjusted"]]
    return lines


def line(entry: dict[str, Any]) -> str:
    value = entry["value"]
    shown = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
    return f"{entry['name']} = {shown} ({entry['by']}{': ' + entry['why'] if entry['why'] else ''})"
