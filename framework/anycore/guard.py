"""Runs what others wrote so that its failure, or its silence, becomes a sentence instead of a stop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from threading import Thread
from typing import TypeVar

from anycore.contract.declare import Probe

T = TypeVar("T")


def safe_probe(probe: Callable[[], Probe], seconds: float) -> Probe:
    """Run a probe that may raise or hang all the same, and turn that into a Probe with the reason."""
    try:
        result = guarded(probe, seconds)
        if not isinstance(result, Probe):
            raise TypeError(f"the probe returned {type(result).__name__}, not a Probe")
        return result
    except Exception as error:
        return Probe(reason=describe(error), advice="This is a fault of the plugin's probe: report it to its authors.")


def guarded(work: Callable[[], T], seconds: float) -> T:
    """Return `work()`, run in a daemon thread that is given up, not killed, after `seconds`.

    Raises:
        TimeoutError: it had not ended by then.
        Exception: whatever it raised; an attempt to exit the process becomes a RuntimeError.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # SystemExit and its like must not pass for success
            future.set_exception(RuntimeError(describe(error)))

    Thread(target=run, daemon=True, name="anycore-guarded").start()
    try:
        return future.result(timeout=seconds)
    except NotDone:
        if future.done():
            raise
        raise TimeoutError(f"did not answer within {seconds:g} s") from None


def sentence(text: str) -> str:
    """End `text` with a full stop, its further lines indented."""
    text = text.strip().replace("\n", "\n    ")
    return text if text.endswith((".", "!", "?")) else text + "."


def describe(error: BaseException) -> str:
    """Name an error by its type and its own words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
