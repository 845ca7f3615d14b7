"""The echo backend: what it declares and what it sees. Nothing here imports torch; `device.py` does, once opened.

A plugin is this and a line in pyproject.toml: `[project.entry-points.anycore]  echo = "anycore_echo"`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anycore import hookimpl
from anycore.contract.declare import FEATURES, BackendSpec, Device, Level, Probe, Support, Task

if TYPE_CHECKING:
    from anycore.contract.backend import Backend


@dataclass(frozen=True, slots=True)
class Script:
    """The device to play, and what shall go wrong with it. ANYCORE_ECHO holds these fields as a JSON object."""

    name: str = "echo"
    priority: int = -100  # below the CPU: never taken by --backend auto
    api: tuple[int, int] = (1, 1)
    devices: int = 1
    chip: str = "echo1"
    built_for: tuple[str, ...] = ()  # chips that there are kernels for; (): all
    weights: tuple[str, ...] = ("float32", "bfloat16", "float16")
    features: tuple[str, ...] = tuple(FEATURES)
    memory_total: int = 4 * 2**30
    memory_free: int = 4 * 2**30
    driver: str = "12.1"
    driver_needed: str = "12.1"
    failure: str = ""  # "library", "permission", "raise" or "hang" in the probe; "open" when opened
    lacks: tuple[str, ...] = ()  # operations without a kernel: using one fails
    emulates: tuple[str, ...] = ()  # operations without a kernel, computed by the default and counted
    fail_at_step: int = 0  # the step, counted from 1, in which the device is lost; 0: never
    nan_at_step: int = 0  # the step whose results are not numbers; 0: none
    repeat: bool = False  # answer each row with its own input token, instead of the model's


def read_script(environ: Mapping[str, str] = os.environ) -> Script:
    """Read ANYCORE_ECHO; a misspelt field raises TypeError, which anycore reports as this plugin's failure."""
    given = json.loads(environ.get("ANYCORE_ECHO") or "{}")
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return Script(**fields)


def spec(script: Script) -> BackendSpec:
    """Declare the backend: its rows of the capability matrix, how to look for it, how to open it."""
    row = partial(Support, weights=script.weights, level=Level.REFERENCE, chips=script.built_for)
    return BackendSpec(
        name=script.name,
        api=script.api,
        support=(
            row(tasks=tuple(Task), attention="causal", features=script.features, block_sizes=(16,)),
            row(tasks=(Task.EMBED, Task.RERANK), attention="bidirectional", features=script.features),
        ),
        probe=partial(probe, script),
        open=partial(open_device, script),
        priority=script.priority,
    )


def probe(script: Script) -> Probe:
    """Look for devices, cheaply. What is missing is told with the original words and the operator's next step."""
    versions = {"driver": script.driver, "driver needed": script.driver_needed}
    if script.failure == "hang":
        time.sleep(3600)
    if script.failure == "raise":
        raise RuntimeError("echo: the probe itself failed")
    if script.failure == "library":
        return Probe(
            reason="OSError: libecho.so.1: cannot open shared object file: No such file or directory",
            advice="Install the echo runtime.",
        )
    if script.failure == "permission":
        return Probe(
            reason="PermissionError: [Errno 13] Permission denied: '/dev/echo0'",
            advice="Add this user to the group echo.",
            versions=versions,
        )
    if _numbers(script.driver) < _numbers(script.driver_needed):
        reason = f"driver {script.driver} found, {script.driver_needed} or newer needed"
        return Probe(reason=reason, advice="Upgrade the echo driver.", versions=versions)
    if script.devices == 0:
        return Probe(reason="the driver sees 0 devices", advice="Check the cable.", versions=versions)
    devices = [Device(i, f"Echo {i}", script.chip, script.memory_total) for i in range(script.devices)]
    return Probe(devices=tuple(devices), versions=versions)


def open_device(script: Script, index: int) -> Backend:
    """Open one device. Heavy imports start here."""
    from anycore_echo.device import Echo

    return Echo(script, index)


@hookimpl
def register_backends() -> list[BackendSpec]:
    """Answer anycore's question for backends."""
    return [spec(read_script())]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
