"""How far a model is: its phase, and the reason with a code that programs can rely on."""

from __future__ import annotations

import time
from enum import Enum

import msgspec


class Phase(str, Enum):
    """How far an engine is (the first four and the last), or a model, from what stops a server to what serves."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"  # its engine ended, and another one is on its way
    DRAINING = "draining"  # it finishes what runs and takes nothing
    UNLOADED = "unloaded"
    DEAD = "dead"


BEHIND = (Phase.DEAD, *list(Phase)[:3], Phase.DEGRADED, Phase.DRAINING, Phase.UNLOADED, Phase.READY)
"""The one that is furthest from serving first."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What the probes say about a model."""

    phase: Phase
    code: str  # why: model_loading, engine_dead, step_stalled, idle, …; "ready" where nothing is the matter
    since: float = msgspec.field(default_factory=time.monotonic)
    reason: str = ""  # the same for people
    activity: str = ""  # of the engine that is being loaded, also beside one that serves
    fraction: float = 0.0  # of that activity, 0..1
