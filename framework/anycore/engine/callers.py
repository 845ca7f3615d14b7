"""One engine for several callers in a process: threads, and streams that are read in turn.

Whoever waits for results takes the step that is next, for all, and leaves the others theirs. Used by `LLM`.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

from anycore.engine.engine import Engine
from anycore.engine.request import Delta, NewRequest


class Callers:
    """The engine, in use by one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turn = Lock()  # held by the thread that uses the engine
        self.waiting: dict[str, Caller] = {}  # whose the unfinished requests are, by request id
        self._unwanted: deque[tuple[str, int | None]] = deque()  # what is to end: requests, or one sequence of theirs

    def end(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its sequences: now, or after what the engine is in use for.

        It never waits: a generator that was dropped is closed wherever its thread is then, within a step, too.
        """
        self._unwanted.append((request_id, index))
        if self.turn.acquire(blocking=False):
            try:
                self.end_unwanted()
            finally:
                self.turn.release()

    def end_unwanted(self) -> None:
        """End what was asked for. The engine must be this thread's."""
        while self._unwanted:
            self.engine.abort(*self._unwanted.popleft())

    def step(self) -> bool:
        """Compute one step and hand out what it brought; False if there was none. The engine must be this thread's."""
        self.end_unwanted()
        if not self.engine.has_work():
            return False
        for delta in self.engine.step():
            caller = self.waiting.get(delta.id)
            if caller is not None:
                caller.arrived.append(delta)
        return True

    def settle(self) -> None:
        """Once nobody waits, take what is left of a step that was begun ahead."""
        with self.turn:
            self.end_unwanted()
            while not self.waiting and self.engine.has_work():
                self.engine.step()


class Caller:
    """The requests of one call, which is one thread's at a time. As a context, it ends with those that are left."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._left: dict[str, set[int]] = {}  # sequences that go on, by request id
        self.arrived: deque[Delta] = deque()  # results that this caller has not looked at

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._left):
            self._forget(name)
            self._callers.end(name)

    @property
    def open(self) -> bool:
        """Whether there is more to come."""
        return bool(self._left)

    def add(self, request: NewRequest, wait: bool = False) -> bool:
        """Admit a request. With `wait`, return False if the queue is full, unless nothing will ever leave it.

        Raises:
            Overloaded, BadRequest: as `Engine.add`.
        """
        with self._callers.turn:
            self._callers.end_unwanted()
            engine = self._callers.engine
            if wait and engine.has_work() and not engine.has_room(request):
                return False
            engine.add(request)
            self._callers.waiting[request.id] = self
        self._left[request.id] = set(range(request.sampling.n if request.sampling is not None else 1))
        return True

    def step(self) -> list[Delta]:
        """Return what has come; if nothing has, what one step brings, which may be others' alone."""
        if not self.arrived:
            with self._callers.turn:
                if not self.arrived and not self._callers.step():  # else it came while this thread waited
                    self._left.clear()
        found = [self.arrived.popleft() for _ in range(len(self.arrived))]
        for delta in found:
            if delta.finish is not None:
                self._finish(delta.id, delta.index)
        if not self._left:
            self._callers.settle()
        return found

    def end(self, request_id: str, index: int) -> None:
        """End one sequence, of which no more is wanted."""
        self._finish(request_id, index)
        self._callers.end(request_id, index)

    def _finish(self, request_id: str, index: int) -> None:
        left = self._left.get(request_id)
        if left is not None:
            left.discard(index)
            if not left:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._left[request_id]
        self._callers.waiting.pop(request_id, None)
