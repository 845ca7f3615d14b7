"""Recording what a step launches, to run it again at once: the part that each device does in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anycore.contract.backend import StepOutput
from anycore.contract.batch import Batch

Replay = Callable[[Batch], None]
"""Runs what was captured. The batch, whose rows are on the desk already, is for devices whose kernels take lengths
from the host: they renew them first.
"""


class NotCaptured(Exception):
    """Raised by a `Capture` that cannot record a step; says why. Such steps then run as they are."""


class Capture(Protocol):
    """The device's part: record what `work` launches, without running it, and return what runs it again.

    `work` has run before, so that nothing is compiled or allocated for the first time while recording.
    """

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[Replay, StepOutput]: ...
