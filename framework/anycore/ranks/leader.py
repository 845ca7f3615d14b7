"""The first rank: opens a model together with the others, which it starts unless a launcher has started them.

`open_model` is what the server's engine process and `LLM` build engines by, of one rank or of several.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import current_thread, main_thread
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from anycore.engine.launch import Prepared, build
from anycore.errors import AnycoreError, ConfigError, Unavailable
from anycore.models.source import Progress
from anycore.ranks import meeting
from anycore.ranks.engines import LeadingEngine
from anycore.ranks.links import Hub
from anycore.ranks.messages import BOOT, Boot, End, Failed, Go, Here, Told
from anycore.ranks.watch import SILENCE, Watch

if TYPE_CHECKING:
    from anycore.contract.backend import Backend
    from anycore.engine.engine import Engine

COMMAND = (sys.executable, "-m", "anycore.ranks.follower")
PATIENCE = 600.0  # seconds for all ranks to come
HEAR_SECONDS = 0.2
PATIENT_SILENCE = 60.0  # of a first rank that is somebody's own program, which may be busy with other things


@dataclass(frozen=True, slots=True)
class Home:
    """What kind of process the first rank is.

    Args:
        own: it is there for the model alone: it may be ended when it hangs.
        log_level: of the other ranks.
    """

    own: bool = False
    log_level: str = "warning"


def open_model(
    prepared: Prepared,
    progress: Progress | None = None,
    at_least: Mapping[str, int] = MappingProxyType({}),
    home: Home = Home(),
) -> Engine:
    """Build the engine of a model that is ready for it, of one rank or as the first of several.

    Raises:
        AnycoreError: as `launch.build`, for any of the ranks.
    """
    if prepared.spec.shard is None:
        return build(prepared, progress, at_least)
    check_free()
    ranks = Ranks(prepared, home)
    try:
        engine = build(prepared, progress, at_least, join=ranks.join, kind=LeadingEngine)
    except BaseException as error:
        found = ranks.reason() if isinstance(error, Exception) and not isinstance(error, AnycoreError) else None
        ranks.close()
        if found is not None:
            raise found from error
        raise
    assert isinstance(engine, LeadingEngine)
    ranks.serve()
    engine.lead(ranks)
    weakref.finalize(engine, ranks.close)  # also at the end of the interpreter
    return engine


class Ranks:
    """The other ranks, as the first one sees them: a `Teller`."""

    def __init__(self, prepared: Prepared, home: Home) -> None:
        self.size = prepared.config.tensor_parallel_size
        self._met = meeting.announced(self.size)
        self._folder = Path(tempfile.mkdtemp(prefix="anycore-ranks-"))
        self._failed: Failed | None = None
        self._reason: AnycoreError | None = None
        self._closed = False
        self._backend: Backend | None = None
        where = self._met.address if self._met is not None else f"ipc://{self._folder}"
        processes: dict[int, subprocess.Popen[bytes]] = {}
        last_resort: Callable[[], None] | None = (lambda: os._exit(1)) if home.own else None
        self.watch = Watch(f"{where}{':*' if self._met else '/beats'}", self.size, processes, SILENCE, last_resort)
        self.hub = Hub(f"{where}{':*' if self._met else '/turns'}", self.size)
        boot = Boot(
            config=replace(prepared.config, backend=prepared.choice.spec.name, dtype=prepared.wish.dtype),
            size=self.size,
            turns=self.hub.address,
            beats=self.watch.address,
            store="" if self._met else str(self._folder / "store"),
            leader=os.getpid() if home.own else 0,
            bound=current_thread() is main_thread(),
            silence=SILENCE if home.own else PATIENT_SILENCE,
            log_level=home.log_level,
        )
        self._store = meeting.file_store(boot.store, self.size) if self._met is None else self._met.store()
        if self._met is not None:
            self._store.set(BOOT, msgspec.json.encode(boot).decode())
        else:
            for rank in range(1, self.size):
                processes[rank] = start(msgspec.structs.replace(boot, rank=rank))
        self.watch.start()

    def join(self, backend: Backend) -> None:
        """Wait for the others, and become one of them."""
        self._backend = backend
        here: set[int] = set()
        end = time.monotonic() + PATIENCE
        while len(here) < self.size - 1:
            answer = self.hub.hear(HEAR_SECONDS)
            if isinstance(answer, Here):
                here.add(answer.rank)
                continue
            if isinstance(answer, Failed):
                self._failed = answer
            if (reason := self.reason(0.0)) is not None:
                raise reason
            if time.monotonic() > end:
                missing = sorted(set(range(1, self.size)) - here)
                raise Unavailable(f"of {self.size} ranks {missing} have not come within {PATIENCE:g} s")
        self.hub.tell(Go())
        backend.join(self._store, 0, self.size, self._met is None)

    def serve(self) -> None:
        """All are ready, and nobody looks for the others any more: a rank may still do so after this one has joined."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.watch.serve()

    def tell(self, message: Told) -> None:
        self.hub.tell(message)

    def check(self, error: BaseException | None = None) -> None:
        """Raise what ended the group, if it has ended; after an error of a step, wait a moment for what that was.

        Raises:
            Unavailable: a rank is lost, or this one has left.
        """
        if self._reason is None and not self._closed and (error is not None or self.watch.failure):
            self._reason = self.reason(1.0 if isinstance(error, Exception) else 0.0)
        if self._reason is not None:
            raise self._reason from error
        if self._closed:
            raise Unavailable("this model was closed, or a step of it broken off", code="engine_dead") from error

    def reason(self, seconds: float = 1.0) -> AnycoreError | None:
        """Why the group has ended, in the words of the rank that was at fault if it had any."""
        self.watch.lost.wait(seconds if self._failed is None else 0.0)
        while self._failed is None and (answer := self.hub.hear(0.0)) is not None:
            self._failed = answer if isinstance(answer, Failed) else None
        if self._failed is not None:
            failed = self._failed
            return Unavailable(
                f"rank {failed.rank} of {self.size}: {failed.message}", param=failed.param, code=failed.code
            )
        if self.watch.failure:
            return Unavailable(f"the model has lost a part of itself: {self.watch.failure}", code="engine_dead")
        return None

    def close(self) -> None:
        """End the other ranks. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.hub.tell(End())
        self.watch.close()
        self.hub.close()
        if self._backend is not None:
            self._backend.ops.group.close(lost=bool(self.watch.failure))
        shutil.rmtree(self._folder, ignore_errors=True)


def check_free() -> None:
    """Raise ConfigError if this process is a rank of something already."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise ConfigError(
            "this process belongs to a group of torch.distributed already: it can hold one model of several ranks at "
            "a time (its engine has a `close`)",
            param="tensor_parallel_size",
        )


def start(boot: Boot) -> subprocess.Popen[bytes]:
    """Start another rank, in a session of its own: Ctrl-C is for the first one.

    Its settings go through its standard input, the end of which tells it that this process is gone.
    """
    environment = {name: value for name, value in os.environ.items() if name != "ANYCORE_API_KEY"}
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for engines: see server.bridge
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, start_new_session=True, env=environment)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(boot) + b"\n")
    process.stdin.flush()
    return process
