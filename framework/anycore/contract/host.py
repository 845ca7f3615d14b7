"""The host as this process may use it: memory and cores, what containers around it allow included. No torch.

Control groups of version 2 and version 1 are read, nested ones too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory_total() -> int:
    """Bytes this process could ever use: the machine's memory or the tightest container limit."""
    limits = [limit for limit, _ in memory_limits()]
    return min([psutil.virtual_memory().total, *limits])


def memory_free() -> int:
    """Bytes that can be had now, both from the machine and within every container around this process."""
    rooms = [max(0, limit - used) for limit, used in memory_limits()]
    return min([psutil.virtual_memory().available, *rooms])


def memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, in use) in bytes of each group that has a limit. Page cache that would be dropped is not in use."""
    for folder in group_folders(""):
        limit = number(folder / "memory.max")
        used = number(folder / "memory.current")
        if limit is not None and used is not None:
            yield limit, used - (stat(folder, "inactive_file") or 0)
    for folder in group_folders("memory"):
        limit = number(folder / "memory.limit_in_bytes")
        used = number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < 1 << 60:  # version 1 writes "no limit" as a huge number
            yield limit, used - (stat(folder, "total_inactive_file") or 0)


def core_quota() -> float | None:
    """Cores' worth of time that the tightest group allows; None without a quota."""
    quotas = []
    for folder in group_folders(""):
        words = text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    for folder in group_folders("cpu"):
        quota, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def usable_cores() -> int:
    """Cores by affinity, cut by the container's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def group_folders(controller: str) -> Iterator[Path]:
    """Folders of this process's group and all above it; `controller` is empty for version 2.

    Inside a container the path in /proc/self/cgroup may belong to the host's tree: then only the mount's root is there.
    """
    base = ROOT / controller if controller else ROOT
    for line in text(OWN).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            here = base / path.lstrip("/")
            yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(base) and folder != base)
    yield base


def stat(folder: Path, key: str) -> int | None:
    """One number of the group's memory.stat."""
    for line in text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return None


def number(path: Path) -> int | None:
    """The integer in a file; None when there is no file or it says "max"."""
    value = text(path).strip()
    return int(value) if value.lstrip("-").isdigit() else None


def text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
