"""Log lines on standard error, plain or JSON, each with the id of the HTTP request that it is about.

Secrets are replaced by `***` whatever wrote them. What an exception says may quote a prompt: only its kind and where it
happened are written, at every level, unless prompts may be (`--log-prompts`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

import msgspec

from anycore.config import ServerConfig
from anycore.server import visits

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class MaskingFormatter(logging.Formatter):
    """Writes a record as one plain line, traceback below, and masks the given secrets in the result.

    Args:
        label: put before each message: which process it comes from.
        loud: whether texts of exceptions may be written.
    """

    def __init__(self, secrets: Iterable[str], label: str = "", loud: bool = False) -> None:
        super().__init__(FORMAT)
        self._secrets = sorted({s for s in secrets if s}, key=len, reverse=True)
        self._label = label
        self._loud = loud

    def hide(self, secrets: Iterable[str]) -> None:
        """Mask these, too."""
        self._secrets = sorted({*self._secrets, *secrets}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another handler may have written it in full
        return self.mask(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        visit = visits.current()
        marks = [f"{mark}: " for mark in (self._label, visit.id if visit is not None else "") if mark]
        record.message = "".join(marks) + self.message_of(record)
        return super().formatMessage(record)

    def message_of(self, record: logging.LogRecord) -> str:
        said = getattr(record, "said", "") if self._loud else ""
        return f"{record.getMessage()}\n{said}" if said else record.getMessage()

    def formatException(self, raised: Any) -> str:
        if self._loud:
            return super().formatException(raised)
        kind, _, at = raised
        return f"Traceback (most recent call last):\n{''.join(traceback.format_tb(at))}{kind.__name__}"

    def mask(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class JsonFormatter(MaskingFormatter):
    """Writes a record as one JSON object; `extra={"fields": {...}}` of a log call become keys of their own."""

    def format(self, record: logging.LogRecord) -> str:
        visit = visits.current()
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._label,
            "request_id": visit.id if visit is not None else "",
            "message": self.message_of(record),
            "exception": self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else "",
            **getattr(record, "fields", {}),
        }
        shown = {key: self.mask(value) if isinstance(value, str) else value for key, value in line.items()}
        return msgspec.json.encode({key: value for key, value in shown.items() if value != ""}).decode()


FORMATS = {"text": MaskingFormatter, "json": JsonFormatter}


def configure(
    level: str, secrets: Iterable[str] = (), label: str = "", style: str = "text", loud: bool = False
) -> None:
    """Send all log lines of this process to standard error; libraries only from warning on.

    Args:
        label: says in each line which process it comes from, such as the model of an engine.
        style: a key of FORMATS.
        loud: whether texts that may quote prompts are written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[style]([*secrets, os.environ.get("HF_TOKEN", "")], label, loud))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("anycore").setLevel(level.upper())


def of_server(config: ServerConfig, secrets: Iterable[str], label: str = "") -> None:
    """Configure as the server's settings say."""
    configure(config.log_level, secrets, label, config.log_format, config.log_prompts)


def hide(secrets: Iterable[str]) -> None:
    """Mask further secrets from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, MaskingFormatter):
            handler.formatter.hide(secrets)


def log_crash(log: logging.Logger, message: str, error: BaseException) -> None:
    """Log an error that nobody foresaw: its kind and where it happened, and only where prompts may be, its text."""
    places = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", message, type(error).__name__, places.rstrip(), extra={"said": str(error)})
