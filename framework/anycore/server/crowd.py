"""Each connection takes a file descriptor: as many are allowed as the system grants, and one line tells of those that
wait because none is left.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from contextlib import suppress
from typing import Any

MOST = 65536
"""Descriptors that are asked for. Most systems allow 1,024 to begin with, and more to who asks."""
EVERY = 30.0
"""Seconds between lines about connections that wait: the loop tries them all again every second."""

log = logging.getLogger(__name__)


def make_room() -> None:
    """Raise this process's limit of open files, and that of those it starts, as far as it may."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if highest == resource.RLIM_INFINITY else min(MOST, highest)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
        log.info("open files: at most %d, raised from %d", wanted, limit)


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """Tell of connections that cannot be taken in a line, instead of thousands of tracebacks a second."""
    told = -EVERY

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context):
            loop.default_exception_handler(context)
        elif time.monotonic() - told >= EVERY:
            told = time.monotonic()
            log.warning(
                "%s: new connections wait until others end; this process may open %d (ulimit -n)",
                error.strerror,
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )

    loop.set_exception_handler(handle)
