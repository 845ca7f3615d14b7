"""Ask, plan, then run: from a ModelConfig to a running engine.

`prepare` answers from small files alone, before a weight is touched or a device opened; `build` does the heavy part
with the same functions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anycore.choose import Choice, choose
from anycore.config import ModelConfig
from anycore.contract.declare import DTYPES, Device, Level, Need, Task, find
from anycore.engine.memory import MemoryPlan, Room, Wish, plan
from anycore.engine.settle import Decision, settle, wish_of
from anycore.engine.tasks import is_paged
from anycore.errors import ConfigError, TaskNotSupported, Unsupported
from anycore.models.source import Progress, Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.plugins import Plugins

if TYPE_CHECKING:
    from anycore.engine.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is known to fit its task, its backend and, as far as can be told, its memory."""

    config: ModelConfig
    source: Source
    spec: ModelSpec
    task: Task
    possible_tasks: tuple[Task, ...]  # what this checkpoint could be served for
    choice: Choice
    wish: Wish
    plan: MemoryPlan | None  # None: the device's memory is unknown until it is open
    decisions: tuple[Decision, ...]

    @property
    def adjustments(self) -> list[str]:
        """What differs from what was asked for or what the model would have got; --strict refuses these."""
        return [str(d) for d in self.decisions if d.adjusted] + list(self.choice.notices)

    def card(self) -> dict[str, Any]:
        """What `/v1/models` tells about the model."""
        pooling = self.spec.pooling if self.task is not Task.GENERATE else None
        return {
            "architecture": self.spec.architecture,
            "tasks": [self.task.value],
            "possible_tasks": [task.value for task in self.possible_tasks],
            "max_model_len": self.plan.limits.max_model_len if self.plan else self.spec.max_positions,
            "max_num_seqs": self.plan.limits.max_num_seqs if self.plan else None,
            "vocab_size": self.spec.vocab_size,
            "dtype": self.wish.dtype,
            "backend": self.choice.spec.name,
            "device": self.choice.device.name,
            "level": self.choice.support.level.value,
            "pooling": pooling.kind if pooling else None,
            "pooling_source": pooling.source if pooling else None,
            "dimensions": self.spec.vector_size if self.task is Task.EMBED else None,
            "matryoshka": list(pooling.matryoshka) if pooling else [],
            "prompts": [name for name, _ in pooling.prompts] if pooling else [],
            "memory": self.plan.as_dict() if self.plan else None,
            "settings": {d.name: d.value for d in self.decisions},
        }


def prepare(
    config: ModelConfig, plugins: Plugins, *, strict: bool = False, progress: Progress | None = None
) -> Prepared:
    """Find out whether and how a model can be served, from its small files.

    Raises:
        SourceError, ConfigError, Unsupported, PluginError, DoesNotFit: each says what to change.
    """
    source = locate(config.model, revision=config.revision, progress=progress)
    spec = read_spec(source, plugins.architectures(), config.pooling)
    task = _task(config, spec)
    possible = spec.tasks
    spec = spec.for_task(task)
    choice = _choose(config, source, spec, task, plugins)
    wish = wish_of(config, spec, task, choice.spec, choice.support, choice.need.weights)
    total = choice.device.memory
    draft = plan(spec, wish, Room(choice.spec.name, total)) if total is not None else None
    decisions = tuple(settle(config, spec, task, choice.spec, wish, draft)) if draft else ()
    prepared = Prepared(config, source, spec, task, possible, choice, wish, draft, decisions)
    if strict and prepared.adjustments:
        raise ConfigError("--strict refuses what had to be adjusted:\n  - " + "\n  - ".join(prepared.adjustments))
    return prepared


def build(prepared: Prepared, progress: Progress | None = None) -> Engine:
    """Open the device, plan with what is free on it, load, allocate and warm up.

    Raises:
        DoesNotFit: before weights are loaded.
        WeightsError: the files are damaged or incomplete.
        PluginError: the device cannot be opened.
        NonFiniteOutput: the warm-up brought NaN or infinity.
    """
    import torch

    from anycore.choose import open_backend
    from anycore.engine.blocks import BlockPool
    from anycore.engine.engine import Engine
    from anycore.engine.runner import Runner
    from anycore.engine.scheduler import Scheduler
    from anycore.engine.warmup import warm_up
    from anycore.models.loader import load

    config, spec, wish = prepared.config, prepared.spec, prepared.wish
    tell = progress or (lambda phase, fraction: None)
    tell("open", 0.0)
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = open_backend(prepared.choice)
    room = Room(backend.name, backend.memory.total(), backend.memory.free())
    kv_spec = spec.kv(wish.block_size, wish.dtype) if wish.paged else None
    final = plan(spec, wish, room, backend.memory.block_bytes(kv_spec) if kv_spec else None)
    for decision in settle(config, spec, prepared.task, prepared.choice.spec, wish, final):
        log.log(logging.WARNING if decision.guessed else logging.INFO, "%s", decision)

    tell("load", 0.0)
    model = load(prepared.source, spec, backend, wish.dtype, progress)
    kv = backend.memory.allocate_kv(kv_spec, final.limits.blocks) if kv_spec else None
    pool = BlockPool(final.limits.blocks, wish.block_size, config.enable_prefix_caching) if kv_spec else None
    engine = Engine(
        Runner(model, backend, prepared.task, final.limits, kv),
        Scheduler(final.limits, pool, config.scheduling_policy),
        final.limits,
        max_queued=config.max_queued,
        timeout=config.request_timeout,
        seed=config.seed,
    )
    tell("warm up", 0.0)
    warm_up(engine)
    tell("ready", 1.0)
    return engine


def _task(config: ModelConfig, spec: ModelSpec) -> Task:
    if config.task == "auto":
        return spec.tasks[0]
    task = Task(config.task)
    if task not in spec.tasks:
        names = ", ".join(t.value for t in spec.tasks)
        raise TaskNotSupported(f"{spec.architecture} cannot {task.value}: this checkpoint can {names}", param="task")
    return task


def _choose(config: ModelConfig, source: Source, spec: ModelSpec, task: Task, plugins: Plugins) -> Choice:
    """Pick backend and dtype. With `--dtype auto` a native row is preferred to keeping the checkpoint's own type."""
    dtypes = _dtypes(config, spec, source)

    def needs(device: Device) -> Sequence[Need]:
        return [_need(config, spec, task, dtype, device) for dtype in dtypes]

    choice = choose(plugins, needs, config.backend, config.device, config.allow_cpu_fallback)
    if choice.support.level is Level.NATIVE:
        return choice
    for need in needs(choice.device):
        try:
            support = find(choice.spec.support, need)
        except Unsupported:
            continue
        if support.level is Level.NATIVE:
            return replace(choice, need=need, support=support)
    return choice


def _dtypes(config: ModelConfig, spec: ModelSpec, source: Source) -> list[str]:
    """Types to try, best first. float16 is never chosen in place of another: its range is too small (65,504).

    A folder that does not name its type is float32, as in transformers; a GGUF file's blocks have no type of their
    own, and bfloat16 holds what they are precise to.
    """
    if config.dtype != "auto":
        return [config.dtype]
    unsaid = "bfloat16" if source.gguf else "float32"
    own = spec.dtype if spec.dtype in DTYPES else unsaid
    return list(dict.fromkeys([own, "float32"]))


def _need(config: ModelConfig, spec: ModelSpec, task: Task, dtype: str, device: Device) -> Need:
    need = spec.need(task, dtype, config.block_size, device.chip)
    features = list(need.features)
    if is_paged(spec, task):
        features.append("chunked_prefill")
        if config.enable_prefix_caching:
            features.append("prefix_caching")
    return replace(need, features=tuple(features))
