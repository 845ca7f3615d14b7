"""Runs what others wrote so that its failure, or its silence, becomes a sentence instead of a stop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import fields, is_dataclass
from threading import Thread
from typing import Any, TypeVar

from anycore.contract.declare import Device, Level, Probe, Support, Task

T = TypeVar("T")

ITEMS = {"str": str, "int": int, "float": float, "bool": bool, "Task": Task, "Level": Level, "Support": Support,
         "Device": Device}  # fmt: skip
"""What the fields of the contract's data classes are made of, by its name in their annotations."""


def safe_probe(probe: Callable[[], Probe], seconds: float) -> Probe:
    """Run a probe that may raise or hang all the same, and turn that into a Probe with the reason."""
    try:
        result = guarded(probe, seconds)
        if not isinstance(result, Probe):
            raise TypeError(f"the probe returned {type(result).__name__}, not a Probe")
        check_fields(result)
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


def check_fields(value: Any) -> None:
    """Check that a data class of the contract, which a plugin made, holds what its annotations say.

    Raises:
        TypeError: naming the field. Types are not enforced when it is made, and all who read it would fail.
    """
    for item in fields(value):
        kind, given = str(item.type), getattr(value, item.name)
        if not _fits(given, kind):
            name = f"{type(value).__name__}.{item.name}"
            raise TypeError(f"{name} must be {kind}, not {given!r}")
        for each in given if isinstance(given, (tuple, list)) else ():
            if is_dataclass(each):
                check_fields(each)


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of a kind, as annotations have it. Lists pass for tuples; what is not known here passes."""
    if kind.endswith(" | None"):
        return value is None or _fits(value, kind.removesuffix(" | None"))
    if kind.startswith("Callable"):
        return callable(value)
    if kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").split(",")[0]
        return isinstance(value, (tuple, list)) and all(_fits(each, inner) for each in value)
    if kind in ("int", "float"):
        return isinstance(value, (int, ITEMS[kind])) and not isinstance(value, bool)
    return kind not in ITEMS or isinstance(value, ITEMS[kind])


def sentence(text: str) -> str:
    """End `text` with a full stop, its further lines indented."""
    text = text.strip().replace("\n", "\n    ")
    return text if text.endswith((".", "!", "?")) else text + "."


def describe(error: BaseException) -> str:
    """Name an error by its type and its own words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
