"""Slow start-up work (imports, tokenizers) in threads that a stop does not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

NAME = "anycore-aside"

T = TypeVar("T")


async def aside(function: Callable[..., T], *arguments: Any) -> T:
    """Call a slow function in a thread that nothing waits for when the server is stopped meanwhile."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=NAME, daemon=True).start()
    return await future


def busy() -> bool:
    """Whether such a thread is still at work."""
    return any(thread.name == NAME for thread in threading.enumerate())
