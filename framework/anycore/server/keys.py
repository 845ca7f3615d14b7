"""API keys as the server knows them: a name, a hash, scopes and limits. `anycore key new` writes what is read here."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import Any, Literal

import msgspec
import yaml

from anycore.errors import ConfigError

Scope = Literal["infer", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = ("infer", "admin", "metrics")
ENTRIES = (".yaml", ".yml", ".json")
"""Endings of files that hold entries; any other file holds one key a line."""

LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_tokens")
"""Fields of a key that hold a limit, in whole numbers."""

MAX_KEYS = 1000
PREFIX = "ak-"  # so that scanners for leaked secrets have something to look for
SECRET_BYTES = 32


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Limits that are None do not hold.

    Raises:
        ValueError: a field is out of its range; the sentence names it.
    """

    name: str
    sha256: str  # of the key, in hexadecimal: what is asked for has too many bits to be guessed from it
    scopes: frozenset[Scope] = frozenset(("infer",))
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output together
    max_concurrent: int | None = None  # HTTP requests under way
    max_tokens: int | None = None  # of one answer
    weight: float = 1.0  # share of a busy engine, against the weights of the other keys

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name):
            raise ValueError(f"name {self.name[:80]!r} must be 1 to 64 letters, digits, dots, dashes or underscores")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 of key {self.name} must be 64 hexadecimal digits (`anycore key new` writes them)")
        for field in LIMITS:
            value = getattr(self, field)
            if value is not None and not 1 <= value < 2**31:
                raise ValueError(f"{field} of key {self.name} must be between 1 and {2**31 - 1}, not {value}")
        if not 0.001 <= self.weight <= 1000:
            raise ValueError(f"weight of key {self.name} must be between 0.001 and 1000, not {self.weight}")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


def plain(name: str, secret: str) -> Key:
    """Return a key that may do everything, as keys without an entry may."""
    return Key(name=name, sha256=hash_of(secret.encode()), scopes=frozenset(SCOPES))


def hash_of(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def entry_of(key: Key) -> str:
    """Write a key as one line of a file of entries, without what it leaves at its default."""
    given: dict[str, Any] = {"name": key.name, "sha256": key.sha256, "scopes": [s for s in SCOPES if s in key.scopes]}
    given |= {field: getattr(key, field) for field in LIMITS if getattr(key, field) is not None}
    if key.weight != 1:
        given["weight"] = key.weight
    return "- " + json.dumps(given)


def read_entries(text: str) -> list[Key]:
    """Read what a file of entries holds: a list, in YAML or JSON.

    Raises:
        ValueError: it is no such list, or an entry is wrong; the sentence says where.
    """
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"line {mark.line + 1} is not YAML" if mark else "this is not YAML") from None
    if not isinstance(found, list) or not found:
        raise ValueError("this must be a list with one entry a key")
    if len(found) > MAX_KEYS:
        raise ValueError(f"at most {MAX_KEYS} keys are taken, {len(found)} given")
    try:
        return msgspec.convert([_spelled(entry) for entry in found], list[Key])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _spelled(entry: Any) -> Any:
    """Take dashes for underscores in field names, as everywhere in YAML files of settings."""
    return {str(k).replace("-", "_"): v for k, v in entry.items()} if isinstance(entry, dict) else entry


def read_lines(text: str) -> list[str]:
    """Read what a file with one key a line holds.

    Raises:
        ValueError: a line holds blanks, so it is no key: most likely an entry in a file with the wrong ending.
    """
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    for number, line in enumerate(lines, 1):
        if re.search(r"\s", line):
            endings = ", ".join(ENTRIES)
            raise ValueError(f"key {number} holds blanks; entries go into a file whose name ends with {endings}")
    return [line for line in lines if line]


def check_apart(keys: list[Key]) -> None:
    """Raise ConfigError for two keys with one name or one hash."""
    for field in ("name", "sha256"):
        seen: dict[str, str] = {}
        for key in keys:
            value = getattr(key, field)
            if value in seen:
                raise ConfigError(
                    f"keys {seen[value]} and {key.name} have the same {field}: each key is given once",
                    param="api_key_file",
                )
            seen[value] = key.name
