"""Makes an API key. It is printed once, on the first line; a server keeps no more of it than the hash in its entry.

The entry follows, for the file of --api-key-file, or is written there with --file; SIGHUP makes a server read it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from anycore.cli.flags import Parser
from anycore.errors import ConfigError
from anycore.server.keys import LIMITS, SCOPES, Key, check_apart, entry_of, hash_of, new_secret, read_entries

HELP = {
    "requests_per_minute": "requests that may begin in a minute",
    "tokens_per_minute": "tokens, of prompts and answers together, in a minute",
    "max_concurrent": "requests under way at a time",
    "max_tokens": "tokens of one answer: a request for more is refused, one that names no number gets no more",
}
"""What each limit says (default of all: no limit)."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="what logs and metrics call the key")
    parser.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["infer"], help="what it may be used for (default: infer)"
    )
    for field in LIMITS:
        parser.add_argument("--" + field.replace("_", "-"), metavar="N", type=int, help=HELP[field])
    parser.add_argument(
        "--weight",
        metavar="NUMBER",
        type=float,
        default=1.0,
        help="share of a busy engine, against the weights of other keys (default: 1)",
    )
    parser.add_argument("--file", metavar="FILE", type=Path, help="add the entry to this .yaml file")


def run(options: argparse.Namespace) -> int:
    secret = new_secret()
    try:
        key = Key(
            name=options.name,
            sha256=hash_of(secret.encode()),
            scopes=frozenset(options.scopes),
            weight=options.weight,
            **{field: getattr(options, field) for field in LIMITS},
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.file is None:
        hint = "keep the first line, the key: it is not shown again. The second one is for the file of --api-key-file"
        lines = [secret, entry_of(key)]
    else:
        append(options.file, key)
        hint = f"keep this key: it is not shown again. {options.file} holds its entry; SIGHUP makes a server read it"
        lines = [secret]
    print(f"({hint})", file=sys.stderr)
    print(*lines, sep="\n")
    return 0


def append(path: Path, key: Key) -> None:
    """Add a key's entry to a file, which is made if need be, for this user alone.

    Raises:
        ConfigError: the file would not be read with it; it stays as it was.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--file must end in .yaml or .yml, not {path.name!r}", param="file")
    try:
        there = path.read_text("utf-8") if path.exists() else ""
        added = ("" if there.endswith("\n") or not there else "\n") + entry_of(key) + "\n"
        check_apart(read_entries(there + added))
        with open(path, "a", encoding="utf-8", opener=private) as file:
            file.write(added)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} stays as it was: with the new entry, {error}", param="file") from error


def private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
