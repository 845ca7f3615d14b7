"""A cheap look at the processor: cores this process may use, instruction sets that matter, memory, versions."""

from __future__ import annotations

import platform
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from anycore.contract.declare import Device, Probe
from anycore.contract.host import memory_total, usable_cores
from anycore_cpu.kernels import build

CHIPS = {
    "x86-amx-bf16": ("amx_bf16",),
    "x86-avx512-bf16": ("avx512_bf16",),
    "x86-avx512": ("avx512f",),
    "x86-avx2": ("avx2",),
    "arm-bf16": ("bf16", "feat_bf16"),
    "arm": ("asimd", "neon", "feat_fp16"),
}
"""Chip names, best first, and the processor flags that each is recognised by."""

BF16_CHIPS = ("x86-amx-bf16", "x86-avx512-bf16", "arm-bf16")
"""Chips with instructions that multiply bfloat16."""

OTHER_CHIPS = tuple(name for name in CHIPS if name not in BF16_CHIPS)


def plain(chips: tuple[str, ...]) -> tuple[str, ...]:
    """The same chips' names where there are no kernels of our own, and plain torch computes."""
    return tuple(f"{name}-plain" for name in chips)


def probe() -> Probe:
    """Return the one device there always is, or the text of what went wrong while looking."""
    try:
        device = Device(index=0, name=processor_name(), chip=chip(), memory=memory_total())
        versions = {"torch": metadata.version("torch"), "cores": str(usable_cores())}
        return Probe(devices=(device,), versions=versions | {"kernels": build.describe(processor_flags())})
    except metadata.PackageNotFoundError:
        return Probe(reason="torch is not installed", advice="pip install torch")
    except Exception as error:
        return Probe(reason=f"{type(error).__name__}: {error}", advice="report this: the CPU should always be found")


def chip() -> str:
    """The best of CHIPS whose flags this processor has, else the bare machine name; -plain if plain torch computes."""
    flags = processor_flags()
    for name, wanted in CHIPS.items():
        if not flags.isdisjoint(wanted):
            return name if build.available(flags) else plain((name,))[0]
    return platform.machine().lower() or "unknown"


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Lower-case feature names, from /proc/cpuinfo on Linux and sysctl on macOS; empty when neither answers."""
    if platform.system() == "Darwin":
        lines = sysctl("-a", "hw.optional").splitlines()
        on = [line.split(":")[0] for line in lines if line.endswith(": 1")]
        flags = {name.removeprefix("hw.optional.").removeprefix("arm.").lower() for name in on}
        return frozenset(flags | {name.removesuffix("_0") for name in flags})
    for key in ("flags", "Features"):
        if found := cpuinfo(key):
            return frozenset(found.lower().split())
    return frozenset()


@lru_cache(maxsize=1)
def processor_name() -> str:
    if platform.system() == "Darwin":
        return sysctl("-n", "machdep.cpu.brand_string") or platform.machine()
    return cpuinfo("model name") or platform.machine()


def cpuinfo(key: str) -> str:
    """The first value of `key` in /proc/cpuinfo; empty when it is not there."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def sysctl(*arguments: str) -> str:
    """What macOS's sysctl prints; empty when it cannot be run."""
    try:
        done = subprocess.run(("sysctl", *arguments), capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
