"""A real engine's runner under a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from anycore.engine.scheduler import Step


class Paced:
    """A runner whose steps take virtual time: launching one sets when its results are there, collecting waits."""

    def __init__(
        self, runner: Any, seconds: Callable[[Step], float], launching: Callable[[Step], float] = lambda step: 0.0
    ) -> None:
        """`launching` is what the host takes, which the device begins with."""
        self.runner = runner
        self.seconds = seconds
        self.launching = launching
        self.now = 0.0
        self._ends: deque[float] = deque()
        self._free = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, step: Step, ahead: bool = False) -> Any:
        self._free = max(self._free, self.now) + self.seconds(step)
        self.now += self.launching(step)
        self._free = max(self._free, self.now)
        self._ends.append(self._free)
        return self.runner.launch(step, ahead)

    def collect(self, launched: Any) -> Any:
        self.now = max(self.now, self._ends.popleft())
        return self.runner.collect(launched)
