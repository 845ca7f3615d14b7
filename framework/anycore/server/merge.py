"""Several async iterators as one, a bounded number of them under way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, cast

T = TypeVar("T")


async def merge(sources: Sequence[AsyncIterator[T]], window: int) -> AsyncIterator[T]:
    """Yield what `sources` (async generators) yield, as it comes; at most `window` of them run at once.

    The first error ends all. Sources are closed, whichever way this is left.
    """
    if len(sources) == 1:
        async with aclosing(cast(Any, sources[0])) as only:
            async for item in only:
                yield item
        return
    arrived: asyncio.Queue[T | Exception | None] = asyncio.Queue()
    waiting = iter(sources)
    workers = [asyncio.create_task(_drain(waiting, arrived)) for _ in range(min(window, len(sources)))]
    try:
        running = len(workers)
        while running:
            found = await arrived.get()
            if found is None:
                running -= 1
            elif isinstance(found, Exception):
                raise found
            else:
                yield found
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _drain(waiting: Iterable[AsyncIterator[T]], arrived: asyncio.Queue[T | Exception | None]) -> None:
    """Run the sources that wait, one after the other, until none is left."""
    try:
        for source in waiting:
            async with aclosing(cast(Any, source)) as current:
                async for item in current:
                    arrived.put_nowait(item)
    except Exception as error:
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)
