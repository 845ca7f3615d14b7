"""Shows what a report of trouble should carry: versions, devices, failed plugins and the environment, secrets masked.

Exits with 1 when no backend has a device. With --backend, that backend's device is opened and checked, too: small
operations of every kind it declares, against exact results; exits with 1 if one of them is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from anycore import plugins
from anycore.capabilities import capabilities
from anycore.cli.flags import Parser
from anycore.cli.matrix import devices, failures
from anycore.config import ENVIRONMENT, cache_dir
from anycore.errors import AnycoreError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--backend", metavar="NAME", help="open this backend's first device and check it")


def run(options: argparse.Namespace) -> int:
    report = examine(os.environ)
    fine = any(backend["available"] for backend in report["backends"])
    if options.backend is not None:
        report["checks"] = check(options.backend)
        fine = bool(report["checks"]) and all(entry["trouble"] is None for entry in report["checks"])
    print(json.dumps(report, indent=2) if options.json else "\n".join(text(report)))
    return 0 if fine else 1


def check(name: str) -> list[dict[str, Any]]:
    """Open a backend's first device and run the self-check of each attention, data type and head size it declares."""
    spec = plugins.load().backend(name)
    found = spec.probe().devices
    if not found:
        return []
    from anycore.contract.selfcheck import declared, self_check  # imports torch

    backend = spec.open(found[0].index)
    entries: list[dict[str, Any]] = []
    for shape in dict.fromkeys(declared(spec, found[0].chip)):  # rows may overlap
        started = time.monotonic()
        trouble = None
        try:
            self_check(backend, shape)
        except AnycoreError as error:
            trouble = error.message
        attention = "causal" if shape.causal else "bidirectional"
        what = f"{attention}, {shape.dtype}, head size {shape.head_dim}"
        entries.append({"what": what, "seconds": round(time.monotonic() - started, 2), "trouble": trouble})
    backend.close()
    return entries


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Gather everything; nothing is opened or imported for it."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv[0],
        "cache": str(cache_dir(environ)),
        "packages": packages(),
        "environment": {name: masked(name, environ.get(name)) for name in ENVIRONMENT},
        **capabilities(plugins.load(environ=environ)),
    }


def packages() -> dict[str, str]:
    """Return the versions of what anycore requires, and of its extras for devices where installed."""
    found = {}
    for requirement in requires("anycore") or ():
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if re.search(r"extra == .(dev|docs)", requirement):
            continue
        optional = "extra ==" in requirement
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if not optional:
                found[name] = "missing"
    return dict(sorted(found.items()))


def masked(name: str, value: str | None) -> str | None:
    """Hide the value of a variable that holds a secret; only whether it is set shows."""
    return "***" if value and name.endswith(("_KEY", "_TOKEN")) else value


def text(report: dict[str, Any]) -> list[str]:
    """Return the report as lines."""
    lines = [f"anycore {report['anycore']}, contract {report['contract'][0]}.{report['contract'][1]}"]
    lines += [f"python {report['python']}, {report['platform']}", f"cache {report['cache']}", "", "packages"]
    lines += [f"  {name} {found}" for name, found in report["packages"].items()]
    lines += ["", "backends", *(f"  {line}" for line in devices(report))]
    for backend in report["backends"]:
        lines += [f"    {backend['name']}: {name} {found}" for name, found in backend["probe"]["versions"].items()]
    lines += ["", "plugins that cannot be used", *(f"  {line}" for line in failures(report) or ["none"])]
    lines += ["", "environment"]
    for name, value in report["environment"].items():
        lines.append(f"  {name}={value if value is not None else '(not set)'}    {ENVIRONMENT[name]}")
    if "checks" in report:
        lines += ["", "self-check"]
        for entry in report["checks"]:
            lines.append(f"  {entry['what']}: {entry['trouble'] or 'right'} ({entry['seconds']} s)")
        if not report["checks"]:
            lines.append("  no device")
    return lines
