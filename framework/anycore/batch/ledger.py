"""The file of answers: only ever added to, whole lines at a time, so that a killed run can go on where it stood."""

from __future__ import annotations

import fcntl
import os
import stat
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import msgspec

from anycore.batch.lines import key_of_line, key_of_name
from anycore.errors import AnycoreError, ConfigError


class Answer(msgspec.Struct):
    """What came back for a request, as over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Fault(msgspec.Struct, omit_defaults=True):
    """Why there is no answer. A line without a custom_id of its own is told by its number."""

    code: str
    message: str
    line: int = 0


class Record(msgspec.Struct):
    """One line of the file: OpenAI's format."""

    id: str
    custom_id: str | None
    response: Answer | None = None
    error: Fault | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200

    @property
    def key(self) -> int:
        if self.custom_id is not None:
            return key_of_name(self.custom_id)
        return key_of_line(self.error.line if self.error is not None else 0)


BEGINNING = b'{"id":"batch_req_'
"""Of every line, so that no other file is taken for one of ours and cut."""


def record(custom_id: str | None, **parts: Any) -> bytes:
    """Write one line of the file."""
    made = Record(f"batch_req_{uuid4().hex}", custom_id, **parts)
    return msgspec.json.encode(made) + b"\n"


class Unwritable(AnycoreError):
    """The file takes no more; what it holds is whole."""

    code = "output_unwritable"


class Ledger:
    """The open file, locked against a second run. `finished` are the keys of the lines that it answers."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, read what it holds, and cut a last line that was not written to its end.

        Raises:
            ConfigError: it cannot be written, another run has it, or it holds something else.
        """
        self.path = path
        self.finished = array("Q")
        self.failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param="output_file") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ConfigError(
                    f"{path} is no regular file: a run that is killed could not go on", param="output_file"
                )
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"another run writes {path}: let it end first", param="output_file") from error
            self._size = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add whole lines; they are on the disk when this returns.

        Raises:
            Unwritable: the disk is full, say. The file is as it was before.
        """
        data = memoryview(b"".join(lines))
        size = self._size + len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise Unwritable(f"{self.path} cannot be written: {error.strerror}", param="output_file") from error
        self._size = size

    def _read(self) -> int:
        """Note what the file answers; return the bytes it keeps."""
        kept = number = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    if not text.startswith(BEGINNING[: len(text)]):
                        raise self._foreign(number)
                    break
                try:
                    found = msgspec.json.decode(text, type=Record)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise self._foreign(number) from error
                self.finished.append(found.key)
                self.failed += found.failed
                kept += len(text)
        os.ftruncate(self._file, kept)
        return kept

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path}:{number} is no answer of a batch: name another file for the output", param="output_file"
        )
