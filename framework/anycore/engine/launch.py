"""Ask, plan, then run: from a ModelConfig to a running engine.

`prepare` answers from small files alone, before a weight is touched or a device opened; `build` does the heavy part
with the same functions.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from anycore import evidence
from anycore.choose import Choice, NeedFor, choose, fall_back, open_backend
from anycore.config import ModelConfig, flag
from anycore.contract.declare import DTYPES, Device, Level, Need, Task, describe, find
from anycore.contract.formats import KV_CACHES
from anycore.engine.leases import Lease
from anycore.engine.measure import Meter, report
from anycore.engine.memory import MemoryPlan, Room, Wish, kv_of, plan
from anycore.engine.settle import Decision, settle, wish_of
from anycore.engine.sharing import Rank, agree, place, sharing
from anycore.engine.tasks import cannot, is_paged, rounded_cache
from anycore.errors import ConfigError, DoesNotFit, PluginError, TaskNotSupported, Unsupported
from anycore.models.parallel import check_formats, shard
from anycore.models.quantization import ONLINE, schemes
from anycore.models.source import Progress, Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.plugins import Plugins

if TYPE_CHECKING:
    from anycore.contract.backend import Backend
    from anycore.contract.selfcheck import Shape
    from anycore.engine.engine import Engine
    from anycore.engine.runner import Model

    Join = Callable[[Backend], None]

log = logging.getLogger(__name__)

ALONE = Rank()

YOUNG_OBJECTS = 50_000
"""Made between two looks for cycles: steps make none, and thousands of waiting requests are no garbage."""


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
    strict: bool
    plugins: Plugins = field(repr=False)

    @property
    def adjustments(self) -> list[str]:
        """What differs from what was asked for or what the model would have got; `strict` refuses these."""
        return [str(d) for d in self.decisions if d.adjusted]

    def card(self) -> dict[str, Any]:
        """What `/v1/models` tells about the model."""
        pooling = self.spec.pooling if self.task is not Task.GENERATE else None
        return {
            "architecture": self.spec.architecture,
            "tasks": [self.task.value],
            "possible_tasks": [task.value for task in self.possible_tasks],
            "max_model_len": self.plan.limits.max_model_len if self.plan else self.spec.max_positions,
            "max_num_seqs": self.plan.limits.max_num_seqs if self.plan else None,
            "block_size": self.plan.limits.block_size if self.plan else None,
            "num_blocks": self.plan.limits.blocks if self.plan else None,
            "prefix_caching": self.wish.paged and self.config.enable_prefix_caching,
            "vocab_size": self.spec.vocab_size,
            "dtype": self.wish.dtype,
            "quantization": self.wish.quantization.scheme if self.wish.quantization else None,
            "kv_cache_dtype": (self.wish.kv_cache or self.wish.dtype) if self.wish.paged else None,
            "backend": self.choice.spec.name,
            "device": self.choice.device.name,
            "level": self.choice.support.level.value,
            "row": describe(self.choice.support),
            "evidence": evidence.of_row(self.choice.spec, self.choice.support, self.choice.device.chip),
            "pooling": pooling.kind if pooling else None,
            "pooling_source": pooling.source if pooling else None,
            "dimensions": self.spec.usual_vector_size if self.task is Task.EMBED else None,
            "matryoshka": list(pooling.matryoshka) if pooling else [],
            "prompts": [name for name, _ in pooling.prompts] if pooling else [],
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "memory": self.plan.as_dict() if self.plan else None,
            "settings": {d.name: msgspec.to_builtins(d) for d in self.decisions},
        }


def prepare(
    config: ModelConfig,
    plugins: Plugins,
    *,
    strict: bool = False,
    progress: Progress | None = None,
    weights: bool = True,
    rank: Rank = ALONE,
) -> Prepared:
    """Find out whether and how a model can be served, from its small files. `weights=False` fetches nothing else.

    Of a model that several ranks compute together, this is about the part of one of them.

    Raises:
        SourceError, ConfigError, Unsupported, PluginError, DoesNotFit: each says what to change.
    """
    source = find_model(config, weights, progress)
    whole = read_spec(source, plugins.architectures(), config.pooling)
    return fit(config, plugins, source, whole, strict=strict, rank=rank)


def find_model(config: ModelConfig, weights: bool, progress: Progress | None = None) -> Source:
    """Locate a model. Its own weights are not fetched where --checkpoint gives others.

    Raises:
        SourceError: it is not there, or cannot be fetched.
    """
    own = weights and config.checkpoint is None
    source = locate(config.model, revision=config.revision, weights=own, progress=progress)
    return source.with_checkpoint(config.checkpoint)


def fit(
    config: ModelConfig, plugins: Plugins, source: Source, whole: ModelSpec, *, strict: bool = False, rank: Rank = ALONE
) -> Prepared:
    """`prepare` for a model that has been read.

    Raises:
        ConfigError, Unsupported, PluginError, DoesNotFit: each says what to change.
    """
    task = task_of(config, whole)
    spec = whole.for_task(task)
    needs = needs_of(config, source, spec, task)
    try:
        choice = choose(plugins, needs, config.backend, config.device, config.allow_cpu_fallback)
    except Unsupported as error:
        raise _with_others(error, config, plugins, source, whole) from error
    choice = place(prefer_native(choice, needs), config, rank)
    spec = shard(spec, rank.number, config.tensor_parallel_size)
    wish = wish_of(config, spec, task, choice)
    check_formats(spec, wish.quantization)
    prepared = Prepared(config, source, spec, task, whole.tasks, choice, wish, None, (), strict, plugins)
    if choice.device.memory is None:
        return prepared
    total = choice.device.memory // sharing(choice, spec)
    return _settled(prepared, plan(spec, wish, Room(choice.spec.name, total)))


def _with_others(
    error: Unsupported, config: ModelConfig, plugins: Plugins, source: Source, whole: ModelSpec
) -> Unsupported:
    """A refusal, with the other ways of holding the KV cache, or else weights, that would be served."""
    spec = whole.for_task(task_of(config, whole))
    others: dict[str, tuple[str, ...]] = {"quantization": ("none", *ONLINE)}
    if config.kv_cache_dtype != "auto":
        others = {"kv_cache_dtype": (*KV_CACHES, "auto"), **others}
    for name, values in others.items():
        able = []
        for value in values:
            changed: dict[str, Any] = {name: value}
            needs = needs_of(replace(config, **changed), source, spec, spec.tasks[0])
            if needs(Device(0, "", "")) == needs_of(config, source, spec, spec.tasks[0])(Device(0, "", "")):
                continue
            with suppress(Unsupported, PluginError):
                choose(plugins, needs, config.backend, config.device)
                able.append(f"{flag(name)} {value}")
        if able:
            return Unsupported(f"{error.message}\nWould do instead: {', '.join(able)}", param=name)
    return error


def build(
    prepared: Prepared,
    progress: Progress | None = None,
    at_least: Mapping[str, int] = MappingProxyType({}),
    join: Join | None = None,
    kind: type[Engine] | None = None,
) -> Engine:
    """Open the device, plan with what is free on it, load, allocate and warm up.

    Args:
        at_least: numbers of the card that the plan must reach, such as those of the engine that this one is to follow.
        join: makes the open backend one of the ranks that compute the model together; each calls this.
        kind: of engine, where it is not the plain one.

    Raises:
        DoesNotFit: before weights are loaded.
        WeightsError: the files are damaged or incomplete.
        PluginError: the device cannot be opened, or an operation this model needs fails on it or is wrong.
        NonFiniteOutput: the warm-up brought NaN or infinity.
    """
    import torch

    from anycore.contract.selfcheck import self_check
    from anycore.engine.warmup import warm_up
    from anycore.models.loader import load

    tell = progress or (lambda phase, fraction: None)
    tell("open", 0.0)
    parts = sharing(prepared.choice, prepared.spec)
    if prepared.config.threads or parts > 1:
        torch.set_num_threads(prepared.config.threads or max(1, torch.get_num_threads() // parts))
    backend, prepared = _open(prepared)
    spec, wish = prepared.spec, prepared.wish
    assert (join is not None) == (spec.shard is not None), "a model of several ranks is opened by anycore.ranks"
    kv_spec = kv_of(spec, wish) if wish.paged else None
    if backend.self_check:
        self_check(backend, _shape(prepared))
    if join is not None:
        join(backend)
    block_bytes = backend.memory.block_bytes(kv_spec) if kv_spec else None

    def divide(reserved: int) -> MemoryPlan:
        free = max(0, backend.memory.free() - reserved)
        room = Room(backend.name, backend.memory.total() // parts, free // parts)
        return plan(spec, wish, room, block_bytes)

    meter = Meter(backend.memory)
    with Lease(lease_name(prepared, backend)) as lease:
        draft = agree(lease.take(divide, wish.runtime, lambda why: tell(why, 0.0)), backend.ops.group)
        prepared = _settled(prepared, draft)
        _check_reached(prepared.card(), at_least)
        for decision in prepared.decisions:
            log.log(logging.WARNING if decision.guessed or decision.adjusted else logging.INFO, "%s", decision)

        tell("load", 0.0)
        model = load(prepared.source, spec, backend, wish.dtype, progress, wish.quantization)
        meter.mark("weights")
        lease.keep(draft.used - wish.runtime - draft.weights)
        kv = backend.memory.allocate_kv(kv_spec, draft.limits.blocks) if kv_spec else None
        meter.mark("kv_cache")
        lease.keep(draft.working.total - wish.runtime)
        engine = _engine(prepared, backend, model, kv, kind)
        tell("warm up", 0.0)
        with meter.working():
            warm_up(engine)
    engine.card["memory_measured"] = meter.found
    for line in report(draft, meter.found):
        log.info("%s", line)
    gc.freeze()  # what is alive now stays: looking through it again and again would hold up steps
    gc.set_threshold(YOUNG_OBJECTS)
    tell("ready", 1.0)
    return engine


def lease_name(prepared: Prepared, backend: Backend) -> str:
    """What a device's reservations go by. Of ranks that share one, only the first one's are seen by other models."""
    device, shard = prepared.choice.device, prepared.spec.shard
    name = f"{backend.name}-{device.uid or device.index}"
    if shard is None or shard.rank == 0 or sharing(prepared.choice, prepared.spec) == 1:
        return name
    return f"{name}-rank-{shard.rank}"


def _check_reached(card: Mapping[str, Any], at_least: Mapping[str, int]) -> None:
    short = [f"{name} {card[name]} of {number}" for name, number in at_least.items() if (card[name] or 0) < number]
    if short:
        raise DoesNotFit(f"there is memory for less than is wanted: {', '.join(short)}", param="kv_cache_memory")


def _engine(
    prepared: Prepared, backend: Backend, model: Model, kv: list[Any] | None, kind: type[Engine] | None
) -> Engine:
    """Put together what is loaded and allocated."""
    from anycore.engine.blocks import BlockPool
    from anycore.engine.engine import Engine
    from anycore.engine.runner import Runner
    from anycore.engine.scheduler import Scheduler

    assert prepared.plan is not None
    config, limits = prepared.config, prepared.plan.limits
    paged = limits.blocks > 0
    pool = BlockPool(limits.blocks, limits.block_size, config.enable_prefix_caching) if paged else None
    return (kind or Engine)(
        Runner(model, backend, prepared.task, limits, kv),
        Scheduler(limits, pool, config.scheduling_policy, config.fair_share, config.long_prompt_rows),
        limits,
        max_queued=config.max_queued,
        timeout=config.request_timeout,
        seed=config.seed,
        card=prepared.card(),
    )


def _open(prepared: Prepared) -> tuple[Backend, Prepared]:
    """Open the chosen device.

    The CPU stands in for one that cannot be opened, if nobody asked for that one or under --allow-cpu-fallback.
    """
    config, spec, task = prepared.config, prepared.spec, prepared.task
    try:
        return open_backend(prepared.choice), prepared
    except PluginError as error:
        may = (config.allow_cpu_fallback or config.backend == "auto") and spec.shard is None
        if not may or prepared.choice.fell_back or prepared.choice.spec.name == "cpu":
            raise
        needs = needs_of(config, prepared.source, spec, task)
        allowed_by = "--allow-cpu-fallback" if config.allow_cpu_fallback else "--backend auto"
        choice = prefer_native(fall_back(prepared.plugins, needs, error.message, allowed_by), needs)
        choice = replace(choice, notices=(*prepared.choice.notices, *choice.notices))
        prepared = replace(prepared, choice=choice, wish=wish_of(config, spec, task, choice))
        return open_backend(choice), prepared


def _shape(prepared: Prepared) -> Shape:
    """What the self-check has to look at."""
    from anycore.contract.selfcheck import Shape

    spec, wish = prepared.spec, prepared.wish
    return Shape(
        dtype=wish.dtype,
        causal=spec.attention == "causal",
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_size=wish.block_size if wish.paged else 0,
        windows=spec.windows or (None,),
        softcap=spec.softcap,
        activation=spec.activation,
        rotary=spec.rope is not None,
        generates=prepared.task is Task.GENERATE,
        kv_cache=wish.kv_cache,
    )


def _settled(prepared: Prepared, draft: MemoryPlan) -> Prepared:
    """Settle what was left open, as the plan has it.

    Raises:
        ConfigError: there are adjustments, and `strict`.
    """
    decisions = settle(prepared.config, prepared.spec, prepared.task, prepared.choice, prepared.wish, draft)
    prepared = replace(prepared, plan=draft, decisions=tuple(decisions))
    if prepared.strict and prepared.adjustments:
        raise ConfigError("--strict refuses what had to be adjusted:\n  - " + "\n  - ".join(prepared.adjustments))
    return prepared


def task_of(config: ModelConfig, spec: ModelSpec) -> Task:
    """What the model is served for.

    Raises:
        TaskNotSupported: this checkpoint cannot do what is asked; says what it can.
    """
    if config.task == "auto":
        return spec.tasks[0]
    task = Task(config.task)
    if task not in spec.tasks:
        raise TaskNotSupported(cannot(spec, task), param="task")
    return task


def needs_of(config: ModelConfig, source: Source, spec: ModelSpec, task: Task) -> NeedFor:
    """What to ask of a device: the checkpoint's own formats, or those asked for, and the best data type first."""
    wanted = [
        (scheme, dtype)
        for scheme in schemes(config.quantization, spec.stored)
        for dtype in _dtypes(config, spec, source, scheme)
    ]
    return lambda device: [replace(_need(config, spec, task, dtype, device), scheme=scheme) for scheme, dtype in wanted]


def prefer_native(choice: Choice, needs: NeedFor) -> Choice:
    """With `--dtype auto`, prefer a native row to keeping the checkpoint's own type on a slower one.

    Where none is native, the earlier row is the better one.
    """
    wanted = needs(choice.device)
    rows = choice.spec.support
    for need in [wanted] if isinstance(wanted, Need) else wanted:
        if choice.support.level is Level.NATIVE:
            break
        if need.scheme != choice.need.scheme:
            continue
        try:
            support = find(choice.spec.support, need)
        except Unsupported:
            continue
        if support.level is Level.NATIVE or rows.index(support) < rows.index(choice.support):
            choice = replace(choice, need=need, support=support)
    return choice


def _dtypes(config: ModelConfig, spec: ModelSpec, source: Source, scheme: str | None) -> list[str]:
    """Types to try, best first. float16 is never chosen in place of another: its range is too small (65,504).

    A folder that does not name its type is float32, as in transformers; a GGUF file's blocks have no type of their
    own, and bfloat16 holds what they are precise to. So it does beside weights that are quantised anyway, where a
    backend multiplies those by it only.
    """
    if config.dtype != "auto":
        return [config.dtype]
    unsaid = "bfloat16" if source.gguf else "float32"
    own = spec.dtype if spec.dtype in DTYPES else unsaid
    return list(dict.fromkeys([own, "float32"] if scheme is None else [own, "bfloat16", "float32"]))


def _need(config: ModelConfig, spec: ModelSpec, task: Task, dtype: str, device: Device) -> Need:
    need = spec.need(task, dtype, config.block_size, device.chip)
    features = list(need.features)
    if is_paged(spec, task):
        features.append("chunked_prefill")
        if config.enable_prefix_caching:
            features.append("prefix_caching")
    if config.tensor_parallel_size > 1:
        features.append("tensor_parallel")
    return replace(need, features=tuple(features), kv_cache=rounded_cache(config, spec, task))
