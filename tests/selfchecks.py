"""Engines of one process: what the self-check has found right is not computed anew for every next engine.

It would take much of the time of tests that start many. Other operations, kernels or torch than those found right are
checked when they first come.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch

from anycore.contract import selfcheck
from anycore.contract.backend import Backend

HOUSE = ("anycore_cpu.backend", "anycore_ascend.backend")
"""Backends whose operations depend on nothing else; others, which may play faults, are checked every time."""


def check_once() -> None:
    """From now on; whoever has imported `self_check` before, as its own tests have, keeps the real one."""
    check = selfcheck.self_check
    right: set[tuple[Any, ...]] = set()

    def once(backend: Backend, shape: selfcheck.Shape) -> None:
        key = (shape, *computing(backend))
        if key in right:
            return
        check(backend, shape)
        if type(backend).__module__ in HOUSE:
            right.add(key)

    vars(selfcheck)["self_check"] = once


def computing(backend: Backend) -> tuple[Any, ...]:
    """What takes part: classes, their functions, the instance's own, kernels, threads, and torch as they see it."""
    ops: Any = backend.ops
    kinds = tuple(kind for top in (type(backend), type(ops), type(backend.memory)) for kind in top.__mro__)
    functions = tuple(value for kind in kinds for value in vars(kind).values() if isinstance(value, FunctionType))
    own = tuple(value for value in vars(ops).values() if callable(value))
    level = getattr(getattr(ops, "kernels", None), "level", None)
    return kinds, functions, own, level, torch.get_num_threads(), vars(sys.modules[type(ops).__module__]).get("torch")
