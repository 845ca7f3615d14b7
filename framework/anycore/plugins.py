"""Finds the installed plugins and loads each one behind a guard; what fails is kept with its reason.

`load` is called once by whoever starts up (CLI, server, LLM), and the result is handed on; nothing here is global.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from anycore import __version__, hookspecs
from anycore.contract.declare import CONTRACT_VERSION, BackendSpec, Device, Probe, Support
from anycore.errors import ConfigError, PluginError
from anycore.guard import check_fields, describe, guarded, safe_probe, sentence

if TYPE_CHECKING:
    from anycore.engine.request import RequestRecord
    from anycore.models.spec import Architecture
    from anycore.text.replies.parts import Format
    from anycore.toolbox import FunctionTool

GROUP = "anycore"
HOUSE = "anycore"  # the distribution whose plugins are built in: always loaded, and first
SECONDS = 10.0
CALLED = {"register_models": "spec", "register_reply_formats": "fits", "register_tools": "function"}
"""What hooks return objects of, beside backends: each has a name, and this."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or something it brings, that cannot be used; `reason` keeps the original error text."""

    name: str  # entry point, or the backend's name
    distribution: str  # "name version"
    reason: str
    advice: str  # the operator's next step

    def __str__(self) -> str:
        return f"plugin {self.name} ({self.distribution}): {sentence(self.reason)} {self.advice}"


@dataclass(frozen=True, slots=True)
class Plugins:
    """What the installed plugins bring, and what went wrong while asking them."""

    backends: tuple[BackendSpec, ...]  # highest priority first
    failures: tuple[PluginFailure, ...]
    hooks: pluggy.PluginManager
    models: tuple[Architecture, ...] = ()
    formats: tuple[Format, ...] = ()  # of tool calls and reasoning
    tools: tuple[FunctionTool, ...] = ()  # that the server may run

    def architectures(self) -> tuple[Architecture, ...]:
        """Return the architectures that plugins add to the built-in ones."""
        return self.models

    def backend(self, name: str) -> BackendSpec:
        """Return the backend called `name`.

        Raises:
            PluginError: there is none; the message says which there are, and which plugins failed.
        """
        for spec in self.backends:
            if spec.name == name:
                return spec
        names = [spec.name for spec in self.backends]
        near = get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        lines = [f"there is no backend {name!r}; found: {', '.join(names) or 'none'}.{hint}"]
        lines += [f"  - {failure}" for failure in self.failures]
        raise PluginError("\n".join(lines), param="backend")

    def request_finished(self, record: RequestRecord) -> None:
        """Call the hook of every plugin; one that raises is logged and disturbs neither the others nor the server."""
        plugins = self.hooks.list_name_plugin()
        for name, plugin in plugins:
            others = [other for _, other in plugins if other is not plugin]
            try:
                self.hooks.subset_hook_caller("request_finished", others)(record=record)
            except Exception as error:
                log.warning("plugin %s failed in request_finished: %s", name, describe(error))


def load(entries: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] = os.environ) -> Plugins:
    """Load the plugins of entry-point group `anycore` that ANYCORE_PLUGINS selects, the built-in ones first.

    A plugin that raises, hangs, or was written for another contract becomes a PluginFailure; the others go on.
    """
    seconds = _seconds(environ)
    failures: list[PluginFailure] = []
    hooks = _manager()
    backends: dict[str, BackendSpec] = {}
    models: dict[str, Architecture] = {}
    formats: list[Format] = []
    tools: dict[str, FunctionTool] = {}
    found = list(entry_points(group=GROUP) if entries is None else entries)
    for entry in _select(found, environ.get("ANYCORE_PLUGINS"), failures):
        origin = _origin(entry)
        try:
            brought = guarded(partial(_ask, entry), seconds)
            hooks.register(brought.plugin, name=f"{entry.name} ({origin})")
        except Exception as error:
            log.debug("plugin %s failed", entry.name, exc_info=error)
            failures.append(PluginFailure(entry.name, origin, describe(error), _load_advice(error, origin)))
            continue
        for spec in brought.backends:
            failure = _check(spec, backends, origin)
            if failure is not None:
                failures.append(failure)
                continue
            backends[spec.name] = replace(spec, distribution=origin, probe=partial(safe_probe, spec.probe, seconds))
        formats[:0] = brought.formats  # before those of the house, which came first
        for tool in brought.tools:
            if tools.setdefault(tool.name, tool) is not tool:
                reason = "another plugin brings a tool of this name already, and is kept"
                failures.append(PluginFailure(tool.name, origin, reason, "Leave one out with ANYCORE_PLUGINS."))
        for model in brought.models:
            if models.setdefault(model.name, model) is not model:
                reason = "another plugin brings this architecture already, and is kept"
                failures.append(PluginFailure(model.name, origin, reason, "Leave one out with ANYCORE_PLUGINS."))
    ranked = sorted(backends.values(), key=lambda spec: -spec.priority)
    return Plugins(tuple(ranked), tuple(failures), hooks, tuple(models.values()), tuple(formats), tuple(tools.values()))


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


@dataclass(frozen=True, slots=True)
class Brought:
    """What one plugin brings."""

    plugin: Any
    backends: list[BackendSpec]
    models: list[Architecture]
    formats: list[Format]
    tools: list[FunctionTool]


def _ask(entry: EntryPoint) -> Brought:
    """Load one entry point and ask for what it brings. Its own manager keeps a late answer away from ours."""
    plugin = entry.load()
    alone = _manager()
    alone.register(plugin, name=entry.name)
    if not alone.get_hookcallers(plugin):
        raise TypeError(f"{entry.value} has no hook: mark its functions with @anycore.hookimpl")
    alone.check_pending()  # a hook that we do not know: a typo, or a newer anycore
    specs = [spec for specs in alone.hook.register_backends() for spec in specs]
    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise TypeError(f"register_backends must return BackendSpec objects, not {type(spec).__name__}")
        if not (isinstance(spec.api, tuple) and len(spec.api) == 2 and all(isinstance(n, int) for n in spec.api)):
            raise TypeError(f"backend {spec.name}: api must be a contract version such as (1, 0), not {spec.api!r}")
    models, formats, tools = (
        [item for items in getattr(alone.hook, hook)() for item in items if _is_whole(item, hook, part)]
        for hook, part in CALLED.items()
    )
    return Brought(plugin, specs, models, formats, tools)


def _is_whole(item: Any, hook: str, part: str) -> bool:
    """Refuse what would fail its users later, whichever model they ask.

    Raises:
        TypeError: it is a class, or has no name, or not the part that is called.
    """
    if isinstance(item, type):
        raise TypeError(f"{hook} returned the class {item.__name__}, not an object of it")
    if not isinstance(getattr(item, "name", None), str):
        raise TypeError(f"{hook} returned {type(item).__name__}, which has no name")
    if not callable(getattr(item, part, None)):
        raise TypeError(f"{hook} returned {type(item).__name__} {item.name!r}, which has no `{part}` to call")
    return True


def _check(spec: BackendSpec, known: Mapping[str, BackendSpec], origin: str) -> PluginFailure | None:
    """Refuse a backend that was written for another contract, declares what is not of it, or whose name is taken."""
    failure = partial(PluginFailure, str(spec.name), origin)
    package = origin.split()[0]
    ours, theirs = CONTRACT_VERSION, spec.api
    if theirs[0] != ours[0] or theirs[1] > ours[1]:
        return failure(
            f"needs contract {_version(theirs)}, this is {_version(ours)}",
            f"Install a version of {package} for contract {_version(ours)}"
            + (", or upgrade anycore." if theirs > ours else "."),
        )
    try:
        check_fields(spec)
    except TypeError as error:
        return failure(str(error), f"Repair or upgrade {package}, or leave it out with ANYCORE_PLUGINS.")
    if spec.name in known:
        return failure(
            f"the name is already taken by {known[spec.name].distribution}, which is kept",
            f"Uninstall {package}, or leave it out with ANYCORE_PLUGINS.",
        )
    if spec.name == "auto" or not re.fullmatch(r"[a-z][a-z0-9_-]*", spec.name):
        return failure(
            f"{spec.name!r} cannot be the name of a backend",
            "Names are lower-case letters, digits, - and _, and auto is taken.",
        )
    return None


def _select(found: list[EntryPoint], names: str | None, failures: list[PluginFailure]) -> list[EntryPoint]:
    """Return the entry points to load, the built-in ones first; a selected name that is absent is a failure."""
    found.sort(key=lambda entry: (_distribution(entry) != HOUSE, _distribution(entry), entry.name))
    if names is None:
        return found
    wanted = {_normal(name): name.strip() for name in names.split(",") if name.strip()}
    known = {_distribution(entry) for entry in found}
    for name in wanted.keys() - known:
        near = get_close_matches(name, known, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"Install it: pip install {name}."
        failures.append(PluginFailure(wanted[name], "not installed", "named by ANYCORE_PLUGINS, not found", advice))
    return [entry for entry in found if _distribution(entry) == HOUSE or _distribution(entry) in wanted]


def _distribution(entry: EntryPoint) -> str:
    return _normal(entry.dist.name) if entry.dist else ""


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"


def _normal(name: str) -> str:
    """Normalise a distribution name as package indexes do."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _load_advice(error: Exception, origin: str) -> str:
    package = origin.split()[0]
    if isinstance(error, TimeoutError):
        return "Raise ANYCORE_PLUGIN_SECONDS if it is only slow, or leave it out with ANYCORE_PLUGINS."
    if _asks_for_more(error):
        return (
            f"anycore {__version__} has contract {_version(CONTRACT_VERSION)}, which has no such thing: "
            f"upgrade anycore, or install a version of {package} for this contract."
        )
    return f"Repair or upgrade {package}, or leave it out with ANYCORE_PLUGINS."


def _asks_for_more(error: Exception) -> bool:
    """Whether a plugin asked for a name or a field that the contract does not have: most often it is too new."""
    if isinstance(error, ImportError):
        return (error.name or "").split(".")[0] == HOUSE
    named = str(error).split(".")[0] in [kind.__name__ for kind in (BackendSpec, Device, Probe, Support)]
    return isinstance(error, TypeError) and named and "unexpected keyword argument" in str(error)


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("ANYCORE_PLUGIN_SECONDS") or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise ConfigError(f"ANYCORE_PLUGIN_SECONDS must be a number of seconds above 0, not {text!r}")
    return seconds
