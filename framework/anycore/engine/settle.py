"""Every setting that was left open, filled in, with who decided it and why. Nothing is changed without being listed."""

from __future__ import annotations

from dataclasses import dataclass, fields

from anycore.choose import Choice
from anycore.config import ModelConfig, default_of
from anycore.contract.declare import Level, Task
from anycore.engine.memory import MemoryPlan, Wish
from anycore.engine.tasks import is_paged, rounded_cache
from anycore.models.parallel import describe
from anycore.models.parameters import parameters
from anycore.models.quantization import quantization as quantization_of
from anycore.models.spec import ModelSpec

POOLED = 2
"""Embed and rerank take so many times a backend's rows a step: no request waits for its next token meanwhile."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One effective setting.

    `adjusted` marks what differs from what the user or the model would have got, `guessed` what nobody said.
    """

    name: str
    value: str | int | float | bool
    by: str  # "flag", "model", "backend", "plan" or "default"
    why: str = ""
    adjusted: bool = False
    guessed: bool = False

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.by}{': ' + self.why if self.why else ''})"


def wish_of(config: ModelConfig, spec: ModelSpec, task: Task, choice: Choice) -> Wish:
    """What the memory plan has to decide, from the user's settings and the backend's defaults."""
    backend, support = choice.spec, choice.support
    block_size = config.block_size or (support.block_sizes[0] if support.block_sizes else 16)
    return Wish(
        dtype=choice.need.weights,
        block_size=block_size,
        utilization=config.memory_utilization or backend.memory_utilization,
        paged=is_paged(spec, task),
        utilization_asked=config.memory_utilization is not None,
        quantization=quantization_of(
            spec,
            config.quantization,
            choice.need.scheme,
            config.quantization_group,
            backend.tables,
            config.keep_dense,
            groups=backend.groups,
        ),
        head_copied=choice.need.weights in backend.copied_dtypes,
        own_length=_own_length(spec),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        batched_tokens=backend.batched_tokens and backend.batched_tokens * (1 if task is Task.GENERATE else POOLED),
        kv_cache_memory=config.kv_cache_memory,
        kv_cache=rounded_cache(config, spec, task),
        reference=support.level is Level.REFERENCE,
        runtime=backend.runtime,
        workspace=backend.workspace,
        graphs=backend.graphs,
    )


def settle(
    config: ModelConfig, spec: ModelSpec, task: Task, choice: Choice, wish: Wish, plan: MemoryPlan
) -> list[Decision]:
    """List the effective settings."""
    limits = plan.limits
    own = _own_length(spec) or spec.max_positions
    shorter = config.max_model_len is None and limits.max_model_len < own
    decisions = [
        Decision("task", task.value, "flag" if config.task != "auto" else "model"),
        Decision(
            "backend",
            choice.spec.name,
            "flag" if config.backend != "auto" else "default",
            "; ".join(choice.notices),
            adjusted=choice.fell_back,
        ),
        _dtype(config, spec, choice),
        _quantization(config, spec, choice, wish),
        Decision(
            "max_model_len",
            limits.max_model_len,
            "flag" if config.max_model_len else "plan" if shorter else "model",
            f"memory holds one sequence of this length; the model's own is {own}" if shorter else "",
            adjusted=shorter,
        ),
        _limit(config, "max_num_seqs", limits.max_num_seqs),
        _limit(config, "max_num_batched_tokens", limits.max_num_batched_tokens),
        _chosen(config, "max_queued"),
    ]
    if wish.kv_cache_memory is None:
        by = "flag" if config.memory_utilization else "backend"
        decisions.append(Decision("memory_utilization", wish.utilization, by))
    if wish.paged:
        decisions += [
            Decision("block_size", limits.block_size, "flag" if config.block_size else "backend"),
            _kv_cache_dtype(config, wish),
            Decision("kv_cache_memory", plan.kv, "flag" if config.kv_cache_memory else "plan"),
            Decision("kv_blocks", limits.blocks - 1, "plan"),
            _chosen(config, "enable_prefix_caching"),
            _chosen(config, "scheduling_policy"),
        ]
    else:
        why = "this model is computed in one piece: no KV cache, no chunks, no prefix hits"
        decisions.append(Decision("enable_prefix_caching", False, "model", why))
        if config.kv_cache_dtype != "auto":
            why = f"this model keeps no KV cache: --kv-cache-dtype {config.kv_cache_dtype} has no effect"
            decisions.append(Decision("kv_cache_dtype", "none", "model", why, adjusted=True))
    if spec.shard is not None:
        decisions.append(Decision("tensor_parallel_size", spec.shard.ranks, "flag", describe(spec)))
    if spec.pooling is not None and task is not Task.GENERATE:
        guessed = spec.pooling.source == "default"
        why = "the model has no pooling file; set --pooling if this is not how it was trained" if guessed else ""
        decisions.append(Decision("pooling", spec.pooling.kind, spec.pooling.source, why, guessed=guessed))
    return decisions


def _own_length(spec: ModelSpec) -> int | None:
    """The length its files limit the inputs of an embedder or a reranker to; None leaves it to the positions."""
    said = spec.pooling or spec.score
    if said is None or said.max_length is None or Task.GENERATE in spec.tasks:
        return None
    return min(said.max_length, spec.max_positions)


def _dtype(config: ModelConfig, spec: ModelSpec, choice: Choice) -> Decision:
    dtype, scheme = choice.need.weights, choice.need.scheme
    if config.dtype != "auto":
        return Decision("dtype", dtype, "flag")
    if spec.dtype in (None, dtype):
        return Decision("dtype", dtype, "model" if spec.dtype else "backend")
    beside = f" beside {scheme} weights" if scheme else ""
    why = f"the checkpoint is {spec.dtype}, which this device does not compute natively{beside}"
    return Decision("dtype", dtype, "backend", why, adjusted=True)


def _quantization(config: ModelConfig, spec: ModelSpec, choice: Choice, wish: Wish) -> Decision:
    """How weights are held, and what becomes of those that are quantised already."""
    by = "flag" if config.quantization != "auto" else "model"
    stored = spec.stored.method if spec.stored is not None else None
    if wish.quantization is None:
        if stored is None:
            return Decision("quantization", "none", by)
        if config.quantization == "auto":
            why = f"{choice.spec.name} keeps no {stored} weights of this kind: they are made dense"
            return Decision("quantization", "none", "backend", why, adjusted=True)
        return Decision("quantization", "none", by, f"the checkpoint's {stored} weights are made dense")
    count, every = len(wish.quantization.formats), sum(len(p.parts) for p in parameters(spec) if len(p.shape) == 2)
    again = f"the checkpoint's {stored} weights are rounded again; " if stored and config.quantization != "auto" else ""
    return Decision("quantization", wish.quantization.scheme, by, f"{again}{count} of {every} matrices")


def _kv_cache_dtype(config: ModelConfig, wish: Wish) -> Decision:
    """What a number of the cache is held in."""
    if wish.kv_cache is None:
        return Decision("kv_cache_dtype", wish.dtype, "default", "the type of the weights")
    return Decision("kv_cache_dtype", wish.kv_cache, "flag", "a byte a number, a scale for each token and KV head")


def _limit(config: ModelConfig, name: str, value: int) -> Decision:
    return Decision(name, value, "default" if getattr(config, name) is None else "flag")


def _chosen(config: ModelConfig, name: str) -> Decision:
    """A setting with a default of its own."""
    value = getattr(config, name)
    usual = next(default_of(item) for item in fields(ModelConfig) if item.name == name)
    return Decision(name, value, "default" if value == usual else "flag")
