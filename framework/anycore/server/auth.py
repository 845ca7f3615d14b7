"""Where the API keys come from, and which of them a request carries. Only their hashes are kept."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from anycore.config import ServerConfig
from anycore.errors import ConfigError, Unauthorized
from anycore.server.accounts import Account
from anycore.server.keys import ENTRIES, Key, check_apart, hash_of, plain, read_entries, read_lines
from anycore.server.ledger import Ledger

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
"""Probes, which need no key."""


def is_open(path: str) -> bool:
    """Say what needs no key: probes, and the files of the web console, which are the same on every server.

    Everything else does, `/metrics` and `/docs` too: they name models and show load.
    """
    return path in OPEN_ROUTES or path == "/" or path.startswith("/console/")


class Found(NamedTuple):
    """The keys, and those that were given as plain text, so that the log can mask them."""

    keys: list[Key]
    secrets: list[str]


def read_keys(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> Found:
    """Collect the keys of flags, ANYCORE_API_KEY and --api-key-file. All but those of entries may do everything.

    Raises:
        ConfigError: a key is empty, which would lock nobody out, or the file cannot be read.
    """
    flags = [key.strip() for key in config.api_key]
    if any(not key for key in flags):
        raise ConfigError("--api-key must not be empty; leave it out to serve without keys", param="api_key")
    given = {
        "flag": flags,
        "env": [key.strip() for key in environ.get("ANYCORE_API_KEY", "").split(",") if key.strip()],
        "line": [],
    }
    entries: list[Key] = []
    if config.api_key_file is not None:
        path = Path(config.api_key_file)
        try:
            text = path.read_text("utf-8-sig")  # such as Windows writes
            if path.suffix in ENTRIES:
                entries = read_entries(text)
            else:
                given["line"] = read_lines(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {path} cannot be read: {error}", param="api_key_file") from error
        if not entries and not given["line"]:
            raise ConfigError(f"--api-key-file {path} holds no key", param="api_key_file")
    secrets = [secret for found in given.values() for secret in dict.fromkeys(found)]
    keys: dict[str, Key] = {}  # a key given twice, by flag and variable, is one
    for source, found in given.items():
        for number, secret in enumerate(found, 1):
            key = plain(f"{source}-{number}", secret)
            keys.setdefault(key.sha256, key)
    check_apart([*keys.values(), *entries])
    return Found([*keys.values(), *entries], secrets)


class Guard:
    """Knows the key of a request by its `Authorization: Bearer KEY` header. Without keys every request passes."""

    def __init__(self, keys: Sequence[Key], ledger: Ledger | None = None) -> None:
        """`ledger` is what all fronts share; a server with one front needs none."""
        self._ledger = ledger or Ledger()
        self.replace(keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """Take other keys, from the next request on."""
        self._keys = [(key.digest, key) for key in keys]

    def admit(self, path: str, authorization: bytes | None) -> Account:
        """Let a request pass; return the account of its key.

        Raises:
            Unauthorized: the route needs a key, and there is none or a wrong one.
        """
        if not self._keys or is_open(path):
            return Account(None, self._ledger)
        if authorization is None:
            raise Unauthorized("this server needs an API key: send the header `Authorization: Bearer KEY`")
        scheme, _, secret = authorization.partition(b" ")
        digest = bytes.fromhex(hash_of(secret.strip()))
        matches = [key for known, key in self._keys if hmac.compare_digest(digest, known)]  # no early end: equal time
        if scheme.lower() != b"bearer" or not matches:
            raise Unauthorized("the API key is not one of this server's")
        return Account(matches[0], self._ledger)
