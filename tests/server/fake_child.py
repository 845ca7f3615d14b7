"""An engine process with a scripted engine: everything but the model is real.

Run as `python fake_child.py FOLDER key=value ...`; FOLDER is the model folder it claims to serve, the rest is Script.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anycore.contract.declare import Task
from anycore.engine.request import Delta, FinishReason, NewRequest
from anycore.engine.stats import Stats
from anycore.errors import BadRequest, ConfigError, DoesNotFit, Overloaded, WeightsError
from anycore.server import child, wire


@dataclass
class Script:
    """What the engine does besides working."""

    plan: float = 0.0  # seconds to plan
    load: float = 0.0  # seconds to load, in ten parts
    step: float = 0.002  # seconds a step takes
    max_num_seqs: int = 2
    max_queued: int = 4
    refuse: str = ""  # ConfigError while planning
    fail_load: str = ""  # exception while loading
    fail_step: int = 0  # the step that raises
    die_step: int = 0  # the step in which the process is killed
    hang_step: int = 0  # the step that does not end
    alone: int = 0  # 1: it fits on its device only while no other of these engines runs there
    fail_id: str = ""  # requests whose id contains this end with an error


class ScriptedEngine:
    """Generates token 100, 101, … one a step; as many sequences at once as `max_num_seqs`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.scheduler = SimpleNamespace(waiting=[], running=[])
        self.counts = Stats(blocks=100, blocks_free=100)

    def add(self, new: NewRequest) -> None:
        if new.token_ids == [0]:
            raise BadRequest("token 0 is refused", param="prompt")
        number = new.sampling.n if new.sampling else 1
        free = self.script.max_num_seqs - len(self.scheduler.running)
        if len(self.scheduler.waiting) + number > self.script.max_queued + free:
            raise Overloaded("the queue is full")
        for index in range(number):
            timing = SimpleNamespace(started=0.0)
            self.scheduler.waiting.append(SimpleNamespace(id=new.id, index=index, new=new, done=0, timing=timing))

    def abort(self, request_id: str, index: int | None = None) -> None:
        for queue in (self.scheduler.waiting, self.scheduler.running):
            left = [r for r in queue if r.id != request_id or index not in (None, r.index)]
            self.counts.aborted += len(queue) - len(left)
            queue[:] = left

    def drain(self) -> list[str]:
        begun = {r.id for r in self.scheduler.running}
        dropped = list(dict.fromkeys(r.id for r in self.scheduler.waiting if r.id not in begun))
        for request_id in dropped:
            self.abort(request_id)
        return dropped

    def use_pause(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[Delta]:
        self.counts.steps += 1
        if self.counts.steps == self.script.fail_step:
            raise RuntimeError("scripted failure")
        if self.counts.steps == self.script.die_step:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.counts.steps == self.script.hang_step:
            time.sleep(10_000)
        waiting, running = self.scheduler.waiting, self.scheduler.running
        while waiting and len(running) < self.script.max_num_seqs:
            running.append(waiting.pop(0))
            running[-1].timing.started = time.monotonic()
        time.sleep(self.script.step)
        deltas = [self._advance(r) for r in list(running)]
        running[:] = [r for r in running if r.done >= 0]
        return deltas

    def _advance(self, r: Any) -> Delta:
        delta = Delta(id=r.id, index=r.index)
        if self.script.fail_id and self.script.fail_id in r.id:
            r.done = -1
            delta.finish, delta.error, delta.error_code = FinishReason.ERROR, "not finite", "non_finite_output"
        elif r.new.task is not Task.GENERATE:
            r.done = -1
            delta.finish, delta.vector = FinishReason.STOP, b"\0\0\0\0"
        else:
            delta.token_ids = [100 + r.done]
            r.done += 1
            self.counts.output_tokens += 1
            if r.done == (r.new.sampling.max_tokens or 1000):
                r.done = -1
                delta.finish = FinishReason.LENGTH
        return delta

    def stats(self) -> Stats:
        self.counts.running, self.counts.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return self.counts


def scripted(folder: str, *words: str) -> child.Launch:
    """Return what plans and builds a scripted engine; `words` are Script's fields as name=value."""
    kinds = {field.name: type(getattr(Script, field.name)) for field in fields(Script)}
    given = dict(word.split("=", 1) for word in words)
    script = Script(**{name: kinds[name](value) for name, value in given.items()})
    return lambda boot, progress: launch(folder, script, boot)


def launch(folder: str, script: Script, boot: wire.Boot) -> tuple[wire.Planned, child.Build]:
    """Plan and build as the script says."""
    time.sleep(script.plan)
    if script.refuse:
        raise ConfigError(script.refuse, param="model")
    task = boot.config.task if boot.config.task != "auto" else "generate"
    card = {
        "tasks": [task],
        "possible_tasks": [task],
        "max_model_len": 1000,
        "max_num_seqs": script.max_num_seqs,
        "backend": "scripted" if boot.config.backend == "auto" else boot.config.backend,
        "device": "none",
        "checkpoint": boot.config.checkpoint,
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 100,
        "prefix_caching": True,
    }

    def build(progress: child.Progress) -> tuple[ScriptedEngine, dict[str, Any]]:
        if script.alone and boot.at_least:
            raise DoesNotFit("scripted: another one is there")
        if boot.config.checkpoint is not None and not list(Path(boot.config.checkpoint).iterdir()):
            raise WeightsError(f"{boot.config.checkpoint} holds no weights", param="checkpoint")
        for part in range(10):
            progress("weights", part / 10)
            time.sleep(script.load / 10)
        if script.fail_load:
            raise RuntimeError(script.fail_load)
        return ScriptedEngine(script), card

    return wire.Planned(card, boot.config.model, folder), build


if __name__ == "__main__":
    sys.exit(child.main(scripted(*sys.argv[1:])))
