"""The garbage collector of a process of tests: what files have imported is out of its reach, and stays so.

An engine that is ready freezes what is alive, and `LLM` and the conformance kit take that back, to find engines that
were dropped. Here they would take back what a million objects of imports are spared, too: each pass over them takes the
better part of a second, and opening an engine makes several. So engines freeze nothing here. That changes what is
looked through, never what is found: all that tests make is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FREEZE, UNFREEZE, COUNT = gc.freeze, gc.unfreeze, gc.get_freeze_count

GROWN = 100_000
"""Objects within reach after a file's tests, such as modules that they imported, from which on they are frozen, too."""

_asked = False  # an engine has asked to freeze what is alive, and nobody has taken it back


def keep_imports() -> None:
    """From now on: what is alive is out of reach, and engines do not change that."""
    FREEZE()
    vars(gc).update(freeze=_freeze, unfreeze=_unfreeze, get_freeze_count=_count)


def look_through() -> None:
    """Let go what nobody holds any more. Once much is left, all is looked through, and what is left is kept."""
    gc.collect()
    if len(gc.get_objects()) > GROWN:
        UNFREEZE()
        gc.collect()
        FREEZE()


@contextmanager
def as_elsewhere() -> Iterator[None]:
    """The collector as it is where no tests run, for tests of what is frozen."""
    ours = {name: vars(gc)[name] for name in ("freeze", "unfreeze", "get_freeze_count")}
    vars(gc).update(freeze=FREEZE, unfreeze=UNFREEZE, get_freeze_count=COUNT)
    try:
        yield
    finally:
        vars(gc).update(ours)
        UNFREEZE()
        gc.collect()
        FREEZE()


def _freeze() -> None:
    global _asked
    _asked = True


def _unfreeze() -> None:
    global _asked
    _asked = False


def _count() -> int:
    return int(_asked)
