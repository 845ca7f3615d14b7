"""Picks the backend and device for a need, or says of every backend why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Timer
from typing import TYPE_CHECKING

from anycore.contract.declare import BackendSpec, Device, Need, Support, find
from anycore.errors import AnycoreError, PluginError, Unsupported
from anycore.guard import describe, sentence

if TYPE_CHECKING:
    from anycore.contract.backend import Backend
    from anycore.plugins import Plugins

PATIENCE = 30
"""Seconds after which an opening that has not come back is told: it may take long, and cannot be broken off."""

log = logging.getLogger(__name__)

NeedFor = Callable[[Device], "Need | Sequence[Need]"]
"""What is needed on a given device; several needs come in order of preference (`dtype auto`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend and device for a need, the table row that covers it, and what the operator should hear about it."""

    spec: BackendSpec
    device: Device
    need: Need
    support: Support
    notices: tuple[str, ...] = ()
    fell_back: bool = False  # it is not what was asked for


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why one backend cannot serve a need."""

    spec: BackendSpec
    reason: str
    advice: str
    device_seen: bool  # the device is there: only the table says no

    def __str__(self) -> str:
        return f"{self.spec.name}: {sentence(self.reason)} {self.advice}".rstrip()


def choose(
    plugins: Plugins,
    need_for: NeedFor,
    requested: str,
    device: int = 0,
    allow_cpu_fallback: bool = False,
) -> Choice:
    """Pick the backend and device for a need, without opening anything.

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
    try:
        spec = plugins.backend(requested)
    except PluginError as error:
        if not allow_cpu_fallback:
            raise
        return fall_back(plugins, need_for, error.message)
    result = _try(spec, need_for, device)
    if isinstance(result, Choice):
        return result
    if allow_cpu_fallback:
        return fall_back(plugins, need_for, str(result))
    others = [_try(other, need_for, None) for other in plugins.backends if other is not spec]
    raise _refused(f"backend {requested} cannot serve this", [result], plugins, others)


def fall_back(plugins: Plugins, need_for: NeedFor, why: str, allowed_by: str = "--allow-cpu-fallback") -> Choice:
    """Choose the CPU in place of another backend, with `why` as a notice.

    Only under --allow-cpu-fallback, or where nobody asked for that other one (`--backend auto`).

    Raises:
        PluginError, Unsupported: the CPU cannot serve this either.
    """
    result = _try(plugins.backend("cpu"), need_for, None)
    if isinstance(result, Choice):
        return replace(result, notices=(f"falling back to cpu ({allowed_by}): {why}",), fell_back=True)
    raise _refused(f"{sentence(why)} The cpu cannot serve this either", [result], plugins)


def open_backend(choice: Choice) -> Backend:
    """Open the chosen device.

    Raises:
        PluginError: it cannot be opened, with the original error text.
    """
    name = choice.spec.name
    patience = Timer(
        PATIENCE, log.warning, ("backend %s has been opening %s for %d s", name, choice.device.name, PATIENCE)
    )
    patience.daemon = True
    patience.start()
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
    finally:
        patience.cancel()


def _try(spec: BackendSpec, need_for: NeedFor, index: int | None) -> Choice | _Refusal:
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
