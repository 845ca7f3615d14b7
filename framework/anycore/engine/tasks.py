"""How a task is computed on a model: which hidden rows it needs, and whether a request may be split. No torch."""

from __future__ import annotations

from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.errors import ConfigError
from anycore.models.spec import ModelSpec


def cannot(spec: ModelSpec, *tasks: Task) -> str:
    """Say that a checkpoint cannot be served for any of `tasks`, and for what it can."""
    asked = " or ".join(task.value for task in tasks)
    return f"{spec.architecture} cannot {asked}: this checkpoint can {', '.join(task.value for task in spec.tasks)}"


def check_length(asked: int, spec: ModelSpec) -> None:
    """Raise ConfigError for sequences that are longer than the model's positions."""
    if asked > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {spec.max_positions} positions this model was made for",
            param="max_model_len",
        )


def wanted_rows(spec: ModelSpec, task: Task) -> str:
    """Which hidden rows of a request the output is made of: "first", "last" or "all"."""
    if task is Task.GENERATE:
        return "last"
    if task is Task.RERANK and spec.score is not None and spec.score.kind != "cosine":
        classifies_first = spec.score.kind == "classifier" and spec.attention == "bidirectional"
        return "first" if classifies_first else "last"
    kind = spec.pooling.kind if spec.pooling else "last"
    return {"cls": "first", "last": "last", "mean": "all", "max": "all"}[kind]


def is_paged(spec: ModelSpec, task: Task) -> bool:
    """Whether requests keep a KV cache, so that they can be split and share prefixes.

    Generation always does. A causal model whose output is made of the last token alone does, too; what pools over
    all tokens, or looks ahead, is computed in one piece and keeps nothing.
    """
    return spec.attention == "causal" and wanted_rows(spec, task) == "last"


def rounded_cache(config: ModelConfig, spec: ModelSpec, task: Task) -> str | None:
    """The name from KV_CACHES of how keys and values are held; None: as they come, or there are none."""
    if config.kv_cache_dtype == "auto" or not is_paged(spec, task):
        return None
    return "fp8" if config.kv_cache_dtype == "fp8_e4m3" else config.kv_cache_dtype
