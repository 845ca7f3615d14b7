"""Writes the project of a new backend: it serves and passes the conformance kit as it stands, with default operations.

What is left to do is to put your device in the host's place, and to replace one operation after the other.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from string import Template

from anycore import __version__, plugins
from anycore.cli.flags import Parser
from anycore.contract.declare import CONTRACT_VERSION
from anycore.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates" / "backend"
SUFFIX = ".template"
NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the backend, as --backend will take it")
    parser.add_argument("--dir", metavar="FOLDER", type=Path, default=Path(), help="where to put it (default: here)")


def run(options: argparse.Namespace) -> int:
    check_name(options.name)
    words = wording(options.name)
    project = options.dir / words["distribution"]
    if project.exists():
        raise ConfigError(f"{project} is there already and is left as it is: choose another --dir", param="dir")
    for path, text in written(words):
        target = project / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(target)
    print(
        f"\nNext: pip install -e '{project}[dev]', anycore matrix, anycore conformance {options.name} --quick.\n"
        'The page "Writing a backend" of anycore\'s documentation goes on from here.'
    )
    return 0


def check_name(name: str) -> None:
    """Refuse what the plugin manager would refuse later.

    Raises:
        ConfigError: the name is malformed or taken.
    """
    if not NAME.fullmatch(name) or name == "auto":
        raise ConfigError(
            f"{name!r} cannot be the name of a backend: lower-case letters, digits, - and _, and not auto", param="name"
        )
    taken = {spec.name: spec.distribution for spec in plugins.load().backends}
    if name in taken:
        raise ConfigError(f"{name} is the name of a backend already ({taken[name]}): choose another", param="name")


def wording(name: str) -> dict[str, str]:
    """What the templates leave open."""
    parts = re.split("[_-]", name)
    return {
        "name": name,
        "title": "".join(part.capitalize() for part in parts),
        "distribution": "-".join(["anycore", *parts]),
        "package": "_".join(["anycore", *parts]),
        "contract": str(CONTRACT_VERSION),
        "version": __version__,
    }


def written(words: dict[str, str]) -> list[tuple[Path, str]]:
    """Every file of the project: its place, and its text."""
    found = []
    for template in sorted(TEMPLATES.rglob(f"*{SUFFIX}")):
        path = template.relative_to(TEMPLATES).with_suffix("")
        place = Path(*(words["package"] if part == "package" else part for part in path.parts))
        found.append((place, Template(template.read_text(encoding="utf-8")).substitute(words)))
    return found
