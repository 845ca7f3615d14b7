"""API keys: where they come from, and whether a request carries one. Only their hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from anycore.config import ServerConfig
from anycore.errors import ConfigError, Unauthorized

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})
"""What needs no key: probes. Everything else does, `/metrics` and `/docs` too: they name models and show load."""


def read_keys(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Collect the keys of flags, ANYCORE_API_KEY and --api-key-file.

    Raises:
        ConfigError: a key is empty, which would lock nobody out, or the file cannot be read.
    """
    keys = [key.strip() for key in config.api_key]
    if any(not key for key in keys):
        raise ConfigError("--api-key must not be empty; leave it out to serve without keys", param="api_key")
    keys += [key.strip() for key in environ.get("ANYCORE_API_KEY", "").split(",") if key.strip()]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file cannot be read: {error}", param="api_key_file") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {config.api_key_file} holds no key", param="api_key_file")
        keys += found
    return keys


class Guard:
    """Checks the `Authorization: Bearer KEY` header. Without keys every request passes."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def locked(self) -> bool:
        """Whether keys are needed at all."""
        return bool(self._digests)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Let a request pass.

        Raises:
            Unauthorized: the route needs a key, and there is none or a wrong one.
        """
        if not self._digests or path in OPEN_ROUTES:
            return
        if authorization is None:
            raise Unauthorized("this server needs an API key: send the header `Authorization: Bearer KEY`")
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # no early end: equal time
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized("the API key is not one of this server's")
