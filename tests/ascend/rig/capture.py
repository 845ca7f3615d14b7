"""Graphs without kernels: what is launched while a stream is captured is kept as closures, and replayed in order.

As on a chip nothing runs while capturing: outputs keep whatever they held.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from rig.limits import LimitError, need

Work = Callable[[], None]
BEGIN, END, EXECUTE, DESTROY, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END = range(8)
FAILED = 500000  # ACL_ERROR_INTERNAL_ERROR


@dataclass
class Group:
    """A run of a graph's tasks that may be launched anew with other host arguments."""

    graph: list[Work]
    first: int
    last: int


@dataclass
class Recorder:
    """Every graph of this process, by the handle that the runtime gave it."""

    graphs: dict[int, list[Work]] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    current: list[Work] | None = None
    group_start: int = 0
    updating: Group | None = None
    fresh: list[Work] = field(default_factory=list)
    error: BaseException | None = None  # why the last call failed; torch_npu only reports a number

    @property
    def capturing(self) -> bool:
        return self.current is not None

    def launch(self, work: Work) -> None:
        """Run a kernel now, or keep it for later."""
        if self.updating is not None:
            self.fresh.append(work)
        elif self.current is not None:
            self.current.append(work)
        else:
            work()

    def listen(self, moment: int, handle: int) -> int:
        """What runtime.c calls; an exception must not escape into C."""
        try:
            self._handle(moment, handle)
        except Exception as error:
            self.error = error
            traceback.print_exc(file=sys.stderr)
            return FAILED
        return 0

    def _handle(self, moment: int, handle: int) -> None:
        if moment == BEGIN:
            self.current = self.graphs[handle] = []
        elif moment == END:
            self.current = None
        elif moment == EXECUTE:
            for work in list(self.graphs[handle]):
                work()
        elif moment == DESTROY:
            gone = self.graphs.pop(handle, None)
            self.groups = {key: group for key, group in self.groups.items() if group.graph is not gone}
        elif moment == GROUP_BEGIN:
            self.group_start = len(self._recording())
        elif moment == GROUP_END:
            graph = self._recording()
            self.groups[handle] = Group(graph, self.group_start, len(graph))
        elif moment == UPDATE_BEGIN:
            self.updating, self.fresh = self.groups[handle], []
        elif moment == UPDATE_END:
            group, self.updating = self.updating, None
            assert group is not None
            tasks = group.last - group.first
            need(len(self.fresh) == tasks, f"a group of {tasks} launches was updated with {len(self.fresh)}")
            group.graph[group.first : group.last] = self.fresh

    def _recording(self) -> list[Work]:
        if self.current is None:
            raise LimitError("a task group outside of a capture")
        return self.current


RECORDER = Recorder()
"""One a process, as the runtime is."""
