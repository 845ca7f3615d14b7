"""Engine processes that are started before their settings are known to the front: both import at the same time."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

COMMAND = (sys.executable, "-m", "anycore.server.ahead")


async def start(command: tuple[str, ...] | None = None) -> asyncio.subprocess.Process:
    """Start an engine process, which waits for its settings, in a session of its own so that Ctrl-C does not reach it.

    The settings go through its standard input: nothing secret in `ps`, and the end of the pipe tells it that this
    process is gone.
    """
    environment = {k: v for k, v in os.environ.items() if k != "ANYCORE_API_KEY"}
    # Threads of numeric libraries that spin at barriers lose nearly all their speed beside another busy process.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return await asyncio.create_subprocess_exec(
        *(command or COMMAND), stdin=asyncio.subprocess.PIPE, start_new_session=True, env=environment
    )


class Spares:
    """Processes that nobody has taken yet."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, count: int) -> None:
        for _ in range(count):
            self.processes.append(await start())

    async def take(self) -> asyncio.subprocess.Process:
        """One of them, or a new one where none is left alive."""
        while self.processes:
            process = self.processes.pop(0)
            if process.returncode is None:
                return process
        return await start()

    async def end(self) -> None:
        """End those that were not needed."""
        while self.processes:
            process = self.processes.pop()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
