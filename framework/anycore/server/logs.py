"""Plain log lines on standard error, with every secret replaced by `***` whatever wrote it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterable

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class MaskingFormatter(logging.Formatter):
    """Formats a record, traceback included, and masks the given secrets in the result."""

    def __init__(self, secrets: Iterable[str], label: str = "") -> None:
        prefix = f"{label}: ".replace("%", "%%") if label else ""
        super().__init__(FORMAT.replace("%(message)s", prefix + "%(message)s"))
        self._secrets = sorted({s for s in secrets if s}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def configure(level: str, secrets: Iterable[str] = (), label: str = "") -> None:
    """Send all log lines of this process to standard error; libraries only from warning on.

    Args:
        label: put before each message: which model an engine process is for.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter([*secrets, os.environ.get("HF_TOKEN", "")], label))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("anycore").setLevel(level.upper())


def log_crash(log: logging.Logger, message: str, error: BaseException) -> None:
    """Log an error that nobody foresaw: where it happened, and its text only at debug, for it may quote a prompt."""
    places = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", message, type(error).__name__, places.rstrip())
    log.debug("%s: %s", message, error)
