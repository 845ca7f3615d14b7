"""Shows the capability matrix: one row for each thing a backend declares, how far it is proven, and why a backend has
no device here.

It needs no device and imports no backend's libraries, so it answers on any machine. With --model, only the rows that
cover a model, from its config.json alone; `anycore check` says why the others do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anycore import plugins
from anycore.answers import Question
from anycore.ask import covered_rows
from anycore.capabilities import capabilities
from anycore.cli.flags import Parser
from anycore.contract.declare import Task
from anycore.guard import sentence

COLUMNS = (
    "backend", "level", "tasks", "attention", "weights", "schemes", "KV caches", "features", "architectures",
    "head sizes", "block sizes", "chips", "evidence",
)  # fmt: skip
FORMATS = ("table", "json", "markdown")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--backend", metavar="NAME", help="this backend only")
    parser.add_argument("--task", choices=[task.value for task in Task], help="rows for this task only")
    parser.add_argument("--model", metavar="MODEL", help="rows that cover this model only")
    parser.add_argument("--format", choices=FORMATS, default="table", help="how to print it (default: table)")
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")


def run(options: argparse.Namespace) -> int:
    loaded = plugins.load()
    report = narrowed(capabilities(loaded), options, loaded)
    if options.format == "json":
        print(json.dumps(report, indent=2))
    elif options.format == "markdown":
        print("\n".join(markdown(report)))
    elif sys.stdout.isatty():
        show_table(report)
    else:
        print("\n".join(plain(report)))
    return 0


def narrowed(report: dict[str, Any], options: argparse.Namespace, loaded: plugins.Plugins) -> dict[str, Any]:
    """Leave out what was not asked for."""
    if options.backend is not None:
        name = loaded.backend(options.backend).name
        report["backends"] = [backend for backend in report["backends"] if backend["name"] == name]
    covered = None
    if options.model is not None:
        covered = covered_rows(Question(options.model, task=options.task or "auto"), loaded)
    for backend in report["backends"]:
        backend["support"] = [
            row
            for number, row in enumerate(backend["support"])
            if (options.task is None or options.task in row["tasks"])
            and (covered is None or number in covered[backend["name"]])
        ]
    return report


def show_table(report: dict[str, Any]) -> None:
    """Print the matrix as a table that fits the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(*COLUMNS, "note", header_style="bold")
    for cells, note in rows(report):
        table.add_row(*cells, note)
    console.print(table)
    for line in remarks(report):
        console.print(line)


def plain(report: dict[str, Any]) -> list[str]:
    """Return the matrix as lines of columns, each row's note below it."""
    table = [COLUMNS, *(cells for cells, _ in rows(report))]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    notes = ["", *(note for _, note in rows(report))]
    noted = [f"{line}\n    {note}" if note else line for line, note in zip(lines, notes, strict=True)]
    return [*noted, "", *remarks(report)]


def markdown(report: dict[str, Any]) -> list[str]:
    """Return the matrix as a Markdown table, and a list of devices and failures."""
    table = [(*COLUMNS, "note"), ["---"] * (len(COLUMNS) + 1), *((*cells, note) for cells, note in rows(report))]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    return [*lines, "", *(f"- {line}" for line in remarks(report))]


def rows(report: dict[str, Any]) -> list[tuple[tuple[str, ...], str]]:
    """Return (cells, note) of every declared row."""
    out = []
    for backend in report["backends"]:
        for row in backend["support"]:
            lists = [row[name] for name in ("architectures", "head_dims", "block_sizes", "chips")]
            anything = [", ".join(map(str, values)) or "any" for values in lists]
            names = ("tasks", "weights", "schemes", "kv_caches", "features")
            tasks, weights, *others = (", ".join(row[name]) or "-" for name in names)
            cells = (backend["name"], row["level"], tasks, row["attention"], weights, *others)
            out.append(((*cells, *anything, row["evidence"] or "-"), row["note"]))
    return out


def remarks(report: dict[str, Any]) -> list[str]:
    """Return what stands below the table: devices, evidence that cannot be read, plugins that cannot be used."""
    troubles = [line for backend in report["backends"] for line in backend["evidence_troubles"]]
    return [*devices(report), *troubles, *failures(report)]


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
