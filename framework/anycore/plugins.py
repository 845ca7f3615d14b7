"""Finds plugins, loads each one behind a guard, and picks the backend for a need.

`load` is called once by whoever starts up (CLI, server, LLM), and the result is handed on; nothing here is global.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from anycore import hookspecs
from anycore.contract.declare import CONTRACT_VERSION, BackendSpec, Device, Need, Probe, Support, find
from anycore.errors import AnycoreError, ConfigError, PluginError, Unsupported

if TYPE_CHECKING:
    from anycore.contract.backend import Backend
    from anycore.engine.request import RequestRecord
    from anycore.models.spec import Architecture

GROUP = "anycore"
HOUSE = "anycore"  # the distribution whose plugins are built in: always loaded, and first
SECONDS = 10.0

log = logging.getLogger(__name__)
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend and device for a need, the table row that covers it, and what the operator should hear about it."""

    spec: BackendSpec
    device: Device
    need: Need
    support: Support
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why one backend cannot serve a need."""

    spec: BackendSpec
    reason: str
    advice: str
    device_seen: bool  # the device is there: only the table says no

    def __str__(self) -> str:
        return f"{self.spec.name}: {sentence(self.reason)} {self.advice}".rstrip()


def load(entries: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] = os.environ) -> Plugins:
    """Load the plugins of entry-point group `anycore` that ANYCORE_PLUGINS selects, the built-in ones first.

    A plugin that raises, hangs, or was written for another contract becomes a PluginFailure; the others go on.
    """
    seconds = _seconds(environ)
    failures: list[PluginFailure] = []
    hooks = _manager()
    backends: dict[str, BackendSpec] = {}
    models: dict[str, Architecture] = {}
    found = list(entry_points(group=GROUP) if entries is None else entries)
    for entry in _select(found, environ.get("ANYCORE_PLUGINS"), failures):
        origin = _origin(entry)
        try:
            plugin, specs, architectures = guarded(partial(_ask, entry), seconds)
            hooks.register(plugin, name=f"{entry.name} ({origin})")
        except Exception as error:
            log.debug("plugin %s failed", entry.name, exc_info=error)
            failures.append(PluginFailure(entry.name, origin, describe(error), _load_advice(error, origin)))
            continue
        for spec in specs:
            failure = _check(spec, backends, origin)
            if failure is not None:
                failures.append(failure)
                continue
            backends[spec.name] = replace(spec, distribution=origin, probe=partial(safe_probe, spec.probe, seconds))
        for architecture in architectures:
            models.setdefault(architecture.name, architecture)
    ranked = sorted(backends.values(), key=lambda spec: -spec.priority)
    return Plugins(tuple(ranked), tuple(failures), hooks, tuple(models.values()))


def choose(
    plugins: Plugins,
    need_for: Callable[[Device], Need | Sequence[Need]],
    requested: str,
    device: int = 0,
    allow_cpu_fallback: bool = False,
) -> Choice:
    """Pick the backend and device for a need, without opening anything.

    `need_for` tells what is needed on a given device; several needs come in order of preference (`dtype auto`).
    A backend asked for by name is used or refused, never replaced, unless `allow_cpu_fallback`; `auto` takes the
    first one in priority order that has the device and supports the need, and notes which better ones it passed.

    Raises:
        PluginError: the backend, or with auto every backend, has no such device; lists each with its reason.
        Unsupported: the device is there, but no row of the table covers the need; lists each with its reason.
    """
    if requested == "auto":
        refusals: list[_Refusal] = []
        for spec in plugins.backends:
            result = _try(spec, need_for, device)
            if isinstance(result, Choice):
                passed = (*refusals, *plugins.failures)
                return replace(result, notices=tuple(f"backend auto takes {spec.name}, not {why}" for why in passed))
            refusals.append(result)
        raise _refused("no backend can serve this", refusals, plugins)
    spec = plugins.backend(requested)
    result = _try(spec, need_for, device)
    if isinstance(result, Choice):
        return result
    others = [_try(other, need_for, None) for other in plugins.backends if other is not spec]
    for other in others:
        if allow_cpu_fallback and isinstance(other, Choice) and other.spec.name == "cpu":
            return replace(other, notices=(f"falling back to cpu (--allow-cpu-fallback): {result}",))
    raise _refused(f"backend {requested} cannot serve this", [result], plugins, others)


def open_backend(choice: Choice) -> Backend:
    """Open the chosen device.

    Raises:
        PluginError: it cannot be opened, with the original error text.
    """
    try:
        return choice.spec.open(choice.device.index)
    except AnycoreError:
        raise
    except Exception as error:
        raise PluginError(
            f"backend {choice.spec.name} ({choice.spec.distribution}) cannot open device {choice.device.index} "
            f"({choice.device.name}): {describe(error)}. Check the device with `anycore doctor`, or ask for another "
            "backend with --backend.",
            param="backend",
        ) from error


def safe_probe(probe: Callable[[], Probe], seconds: float) -> Probe:
    """Run a probe that may raise or hang all the same, and turn that into a Probe with the reason."""
    try:
        return guarded(probe, seconds)
    except Exception as error:
        return Probe(reason=describe(error), advice="This is a fault of the plugin's probe: report it to its authors.")


def guarded(work: Callable[[], T], seconds: float) -> T:
    """Return `work()`, run in a daemon thread that is given up, not killed, after `seconds`.

    Raises:
        TimeoutError: it had not ended by then.
        Exception: whatever it raised; an attempt to exit the process becomes a RuntimeError.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # SystemExit and its like must not pass for success
            future.set_exception(RuntimeError(describe(error)))

    Thread(target=run, daemon=True, name="anycore-guarded").start()
    try:
        return future.result(timeout=seconds)
    except NotDone:
        if future.done():
            raise
        raise TimeoutError(f"did not answer within {seconds:g} s") from None


def sentence(text: str) -> str:
    """End `text` with a full stop, its further lines indented."""
    text = text.strip().replace("\n", "\n    ")
    return text if text.endswith((".", "!", "?")) else text + "."


def describe(error: BaseException) -> str:
    """Name an error by its type and its own words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _ask(entry: EntryPoint) -> tuple[Any, list[BackendSpec], list[Architecture]]:
    """Load one entry point and ask for what it brings. Its own manager keeps a late answer away from ours."""
    plugin = entry.load()
    alone = _manager()
    alone.register(plugin, name=entry.name)
    alone.check_pending()  # a hook that we do not know: a typo, or a newer anycore
    specs = [spec for specs in alone.hook.register_backends() for spec in specs]
    for spec in specs:
        if not isinstance(spec, BackendSpec):
            raise TypeError(f"register_backends must return BackendSpec objects, not {type(spec).__name__}")
    return plugin, specs, [item for items in alone.hook.register_models() for item in items]


def _check(spec: BackendSpec, known: Mapping[str, BackendSpec], origin: str) -> PluginFailure | None:
    """Refuse a backend that was written for another contract, or whose name is taken or malformed."""
    failure = partial(PluginFailure, spec.name, origin)
    package = origin.split()[0]
    ours, theirs = CONTRACT_VERSION, spec.api
    if theirs[0] != ours[0] or theirs[1] > ours[1]:
        return failure(
            f"needs contract {theirs[0]}.{theirs[1]}, this is {ours[0]}.{ours[1]}",
            f"Install a version of {package} for contract {ours[0]}.{ours[1]}"
            + (", or upgrade anycore." if theirs > ours else "."),
        )
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


def _try(
    spec: BackendSpec, need_for: Callable[[Device], Need | Sequence[Need]], index: int | None
) -> Choice | _Refusal:
    """Try a need on one backend's device `index` (None: its first one)."""
    probe = spec.probe()
    if not probe.available:
        return _Refusal(spec, probe.reason or "no device found", probe.advice, device_seen=False)
    devices = {device.index: device for device in probe.devices}
    device = probe.devices[0] if index is None else devices.get(index)
    if device is None:
        seen = ", ".join(map(str, devices))
        return _Refusal(spec, f"device {index} asked for, devices seen: {seen}", "Choose one with --device.", False)
    wanted = need_for(device)
    needs = [wanted] if isinstance(wanted, Need) else list(wanted)
    reason = ""
    for need in needs:
        try:
            return Choice(spec, device, need, find(spec.support, need))
        except Unsupported as error:
            reason = reason or error.message
    return _Refusal(spec, reason, "", device_seen=True)


def _refused(
    headline: str, refusals: Sequence[_Refusal], plugins: Plugins, others: Sequence[Choice | _Refusal] = ()
) -> AnycoreError:
    """Build the error that lists every backend with its reason, the failed plugins, and the backends that would do."""
    lines = [str(refusal) for refusal in refusals] or ["none is installed: reinstall anycore, which brings cpu"]
    for other in others:
        able = f"{other.spec.name}: would do, with --backend {other.spec.name}"
        lines.append(able if isinstance(other, Choice) else str(other))
    lines += [str(failure) for failure in plugins.failures]
    kind = Unsupported if any(refusal.device_seen for refusal in refusals) else PluginError
    return kind("\n  - ".join([f"{headline}:", *lines]), param="backend")


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
    if isinstance(error, TimeoutError):
        return "Raise ANYCORE_PLUGIN_SECONDS if it is only slow, or leave it out with ANYCORE_PLUGINS."
    return f"Repair or upgrade {origin.split()[0]}, or leave it out with ANYCORE_PLUGINS."


def _seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("ANYCORE_PLUGIN_SECONDS") or str(SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise ConfigError(f"ANYCORE_PLUGIN_SECONDS must be a number of seconds above 0, not {text!r}")
    return seconds
