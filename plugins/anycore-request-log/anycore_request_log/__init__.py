"""Appends one JSON line for every finished request to the file that ANYCORE_REQUEST_LOG names."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec

from anycore import hookimpl

if TYPE_CHECKING:
    from anycore.engine.request import RequestRecord


@hookimpl
def request_finished(record: RequestRecord) -> None:
    """Write the record. The file is opened anew each time, so that it may be moved away while the server runs."""
    path = os.environ.get("ANYCORE_REQUEST_LOG")
    if not path:
        return
    line = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **msgspec.to_builtins(record)}
    # One write to a file in append mode: lines of several processes do not mix.
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
    try:
        os.write(handle, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(handle)
