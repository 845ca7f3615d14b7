"""The lines of a batch file in OpenAI's format, one at a time: what each asks, and the key of its answer."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from anycore.errors import ConfigError

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")
ENVELOPE = 4096  # bytes of a line besides its body


class Asked(msgspec.Struct):
    """One line: a request as it would go over HTTP. Its body is passed on as it was written."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Name(msgspec.Struct):
    custom_id: str


class _Body(msgspec.Struct):
    stream: bool | None = None


class BadLine(Exception):
    """A line that is no request; the sentence says why."""


def read(text: bytes) -> Asked:
    """Read one line.

    Raises:
        BadLine: it is not a request that a batch can hold.
    """
    try:
        asked = msgspec.json.decode(text, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadLine(f"it must be an object with custom_id, method, url and body: {error}") from error
    if not asked.custom_id:
        raise BadLine("custom_id must not be empty")
    if asked.method != "POST":
        raise BadLine(f"method must be POST, not {asked.method[:40]!r}")
    if asked.url not in ROUTES:
        raise BadLine(f"url must be one of {', '.join(ROUTES)}, not {asked.url[:100]!r}")
    try:
        body = msgspec.json.decode(asked.body, type=_Body)
    except msgspec.DecodeError as error:
        raise BadLine(f"body: {error}") from error
    if body.stream:
        raise BadLine("body.stream must be false or left out: a file holds whole answers")
    return asked


def name_of(text: bytes) -> str | None:
    """The custom_id of a line that may be wrong otherwise."""
    try:
        return msgspec.json.decode(text, type=_Name).custom_id or None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def numbered(path: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """Every line and its number, from 1. Of a line above `longest` bytes the beginning comes, one byte too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(longest + 1):
            number += 1
            whole = text
            while not whole.endswith(b"\n") and (whole := file.readline(2**20)):
                pass
            yield number, text.removeprefix(BOM_UTF8).strip() if len(text) <= longest else text


@dataclass(frozen=True)
class Index:
    """Which lines a file has: 8 bytes for each, however long they are."""

    keys: np.ndarray[tuple[int], np.dtype[np.uint64]]  # of line i + 1; 0: it is empty
    repeated: np.ndarray[tuple[int], np.dtype[np.bool_]]  # an earlier line has its custom_id

    @property
    def total(self) -> int:
        return int(np.count_nonzero(self.keys))

    def without(self, finished: array[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which lines have no answer yet."""
        missing: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.keys != 0
        missing &= np.isin(self.keys, np.frombuffer(finished, dtype=np.uint64), invert=True)
        return missing


def index(path: Path, longest: int) -> Index:
    """Read a file once for the keys of its lines: that of its custom_id, or of its number where it has none of its own.

    Raises:
        ConfigError: the file cannot be read.
    """
    found = array("Q")
    try:
        for number, text in numbered(path, longest):
            name = name_of(text) if len(text) <= longest else None
            found.append(0 if not text else key_of_line(number) if name is None else key_of_name(name))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="input_file") from error
    keys = np.array(found, dtype=np.uint64)
    repeated = keys != 0
    repeated[np.unique(keys, return_index=True)[1]] = False
    for place in np.flatnonzero(repeated):
        keys[place] = key_of_line(int(place) + 1)
    return Index(keys, repeated)


def key_of_name(custom_id: str) -> int:
    return _key(custom_id.encode(errors="surrogatepass"), b"name")


def key_of_line(number: int) -> int:
    return _key(str(number).encode(), b"line")


def _key(text: bytes, kind: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8, person=kind).digest(), "little") or 1
