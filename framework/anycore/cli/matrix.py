"""Shows the capability matrix: one row for each thing a backend declares, and why a backend has no device here.

It needs no device and imports no backend's libraries, so it answers on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anycore import plugins
from anycore.capabilities import capabilities
from anycore.cli.flags import Parser
from anycore.guard import sentence

COLUMNS = ("backend", "level", "tasks", "attention", "weights", "architectures", "head sizes", "block sizes", "chips")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    report = capabilities(plugins.load())
    if options.json:
        print(json.dumps(report, indent=2))
    elif sys.stdout.isatty():
        show_table(report)
    else:
        print("\n".join(plain(report)))
    return 0


def show_table(report: dict[str, Any]) -> None:
    """Print the matrix as a table that fits the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(*COLUMNS, "note", header_style="bold")
    for cells, note in rows(report):
        table.add_row(*cells, note)
    console.print(table)
    for line in (*devices(report), *failures(report)):
        console.print(line)


def plain(report: dict[str, Any]) -> list[str]:
    """Return the matrix as lines of columns, each row's note below it."""
    table = [COLUMNS, *(cells for cells, _ in rows(report))]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    notes = ["", *(note for _, note in rows(report))]
    noted = [f"{line}\n    {note}" if note else line for line, note in zip(lines, notes, strict=True)]
    return [*noted, "", *devices(report), *failures(report)]


def rows(report: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """Return (cells, note) of every declared row."""
    out = []
    for backend in report["backends"]:
        for row in backend["support"]:
            lists = [row[name] for name in ("architectures", "head_dims", "block_sizes", "chips")]
            anything = [", ".join(map(str, values)) or "any" for values in lists]
            cells = (
                backend["name"],
                row["level"],
                ", ".join(row["tasks"]),
                row["attention"],
                ", ".join(row["weights"]),
            )
            out.append(((*cells, *anything), row["note"]))
    return out


def devices(report: dict[str, Any]) -> list[str]:
    """Return one line a device found, and one for each backend that has none, with the reason and what to do."""
    lines = []
    for backend in report["backends"]:
        head = f"{backend['name']} ({backend['distribution']})"
        probe = backend["probe"]
        for device in probe["devices"]:
            memory = f", {device['memory'] / 2**30:.1f} GiB" if device["memory"] else ""
            lines.append(f"{head}: device {device['index']}, {device['name']}, chip {device['chip']}{memory}")
        if not probe["devices"]:
            lines.append(f"{head}: no device: {sentence(probe['reason'] or 'none found')} {probe['advice']}".rstrip())
    return lines or ["no backend is installed: reinstall anycore, which brings cpu"]


def failures(report: dict[str, Any]) -> list[str]:
    """Return one line a plugin that cannot be used."""
    return [
        f"plugin {failure['name']} ({failure['distribution']}): {sentence(failure['reason'])} {failure['advice']}"
        for failure in report["failures"]
    ]
