"""What a backend says about itself, as data: the capability matrix and how it is searched.

This module imports no torch, so the matrix can be read on any machine in milliseconds. A backend author fills
`Support` rows and a `BackendSpec`; `find` and `explain` answer start-up, the CLI, the server and the docs alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from anycore.contract.costs import StepShape, reference_workspace
from anycore.errors import Unsupported

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

CONTRACT_VERSION = (1, 1)
"""(major, minor) of the contract. A plugin runs if its major is ours and its minor is not newer than ours.

1.0 is the first. 1.1 added `Backend.load_model`, for backends that run whole models; quantised weights in `Ops.pack`
and the `schemes` and `tables` that say what becomes of them; rounded KV caches (`kv_caches`, `KVSpec.rounded`);
`Memory.held`, and what plans and evidence need of a `BackendSpec`: `known`, `runtime`, `workspace`, `graphs` and
`evidence`; `Backend.join` and the features "tensor_parallel" and "grammars".
"""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dense weight formats and their bytes per element."""

FEATURES = {
    "chunked_prefill": "a prompt may be computed over several steps",
    "prefix_caching": "blocks of an equal prefix are shared between requests",
    "sliding_window": "layers that attend to the last W positions only",
    "softcap": "attention scores bounded by cap * tanh(score / cap)",
    "logprobs": "log-probabilities of sampled, alternative and prompt tokens",
    "grammars": "outputs held to schemas, expressions and grammars: masks over the vocabulary, before sampling",
    "token_types": "segment ids of BERT-like encoders",
    "tensor_parallel": "a model's matrices are divided among several processes, each with a device of its own",
}
"""Words that `Support.features` and `Need.features` may use, with their meaning."""


class Task(str, Enum):
    """What is done with the last hidden state once a request's tokens are all computed."""

    GENERATE = "generate"
    EMBED = "embed"
    RERANK = "rerank"


class Level(str, Enum):
    """How a backend covers a row of the matrix."""

    NATIVE = "native"  # with operations of its own
    REFERENCE = "reference"  # with the contract's plain-torch defaults: right, not fast
    UNSUPPORTED = "unsupported"  # refused; `Support.note` says why


@dataclass(frozen=True, slots=True)
class Support:
    """One line of the capability matrix. An empty tuple means "any"."""

    tasks: tuple[Task, ...]
    attention: str  # "causal" or "bidirectional"
    weights: tuple[str, ...]  # names from DTYPES: dense weights, and what quantised ones are multiplied by
    level: Level
    architectures: tuple[str, ...] = ()  # Hugging Face names, such as "LlamaForCausalLM"
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()  # tokens per KV block; the first one is the default
    features: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    note: str = ""
    schemes: tuple[str, ...] = ()  # names from SCHEMES; empty: dense weights only. Others are made dense if asked for
    kv_caches: tuple[str, ...] = ()  # names from KV_CACHES: rounded caches; empty: only one of the weights' own type


@dataclass(frozen=True, slots=True)
class Need:
    """What a model, a task and the flags ask of a backend. None means "no preference"."""

    task: Task
    attention: str
    architecture: str
    weights: str
    head_dim: int
    block_size: int | None = None
    features: tuple[str, ...] = ()
    chip: str | None = None
    scheme: str | None = None  # a name from SCHEMES; None: dense weights
    kv_cache: str | None = None  # a name from KV_CACHES; None: the cache is of the weights' own type, or there is none


@dataclass(frozen=True, slots=True)
class Device:
    """One device as a probe saw it; `memory` in bytes, None when unknown before opening."""

    index: int
    name: str
    chip: str
    memory: int | None = None
    uid: str = ""  # its own name on this machine, in whatever order devices are counted; "": backend and index are it


@dataclass(frozen=True, slots=True)
class Probe:
    """A cheap look at the machine: devices found, or why not and what to do about it."""

    devices: tuple[Device, ...] = ()
    reason: str = ""  # the original error text when there is no device
    advice: str = ""  # the operator's next step
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def available(self) -> bool:
        return bool(self.devices)


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What the hook `register_backends` returns: naming a backend costs nothing, `open` does the heavy imports."""

    name: str  # what --backend takes
    api: tuple[int, int]  # the CONTRACT_VERSION it was written for
    support: tuple[Support, ...]
    probe: Callable[[], Probe]  # never raises, allocates nothing
    open: Callable[[int], Backend]  # device index -> live backend
    priority: int = 0  # --backend auto takes the highest that is available and supports the need
    memory_utilization: float = 0.9  # default share of the device's memory
    batched_tokens: int | None = None  # default rows of a step; None leaves it to the engine
    evidence: Path | None = None  # folder of reports that `anycore conformance` wrote on devices
    tables: bool = False  # Ops.embedding takes what Ops.pack made of a quantised weight
    groups: bool = False  # Ops.linear multiplies int8 in groups as it is, by rows that it rounds alike
    copied_dtypes: tuple[str, ...] = ()  # weights that Ops.pack copies; a tied head then exists twice
    known: tuple[Device, ...] = ()  # devices that plans may be made for where there is none, by their name
    runtime: int = 0  # bytes that an open device takes before anything is loaded: its context, its libraries
    workspace: Callable[[StepShape], int] = reference_workspace  # bytes its operations take beside their results
    graphs: Callable[[StepShape], int] | None = None  # bytes of captured steps; None: it captures none
    shared_device: bool = False  # the ranks of a model may all run on one device: a host's processor
    distribution: str = ""  # filled in by the plugin manager: "name version" it came from


def mismatches(row: Support, need: Need) -> list[str]:
    """Return why `row` does not cover `need`, most telling reason first; empty when it does."""
    out = []
    if need.task not in row.tasks:
        out.append(f"task {need.task.value} is not among {', '.join(t.value for t in row.tasks)}")
    if need.attention != row.attention:
        out.append(f"{need.attention} attention, while this row is {row.attention}")
    if row.architectures and need.architecture not in row.architectures:
        out.append(f"architecture {need.architecture} is not among {', '.join(row.architectures)}")
    if need.chip is not None and row.chips and need.chip not in row.chips:
        out.append(f"chip {need.chip} is not among {', '.join(row.chips)}")
    if need.weights not in row.weights:
        out.append(f"weights {need.weights} are not among {', '.join(row.weights)}")
    if need.scheme is not None and need.scheme not in row.schemes:
        out.append(f"quantised weights {need.scheme} are not among {', '.join(row.schemes) or 'none'}")
    if need.kv_cache is not None and need.kv_cache not in row.kv_caches and row.level is not Level.UNSUPPORTED:
        declared = f"among {', '.join(row.kv_caches)}" if row.kv_caches else "declared, only one of the weights' type"
        out.append(f"a KV cache in {need.kv_cache} is not {declared}")
    if row.head_dims and need.head_dim not in row.head_dims:
        out.append(f"head size {need.head_dim} is not among {', '.join(map(str, row.head_dims))}")
    if need.block_size is not None and row.block_sizes and need.block_size not in row.block_sizes:
        out.append(f"block size {need.block_size} is not among {', '.join(map(str, row.block_sizes))}")
    missing = [name for name in need.features if name not in row.features]
    if missing and row.level is not Level.UNSUPPORTED:  # what is refused is refused with any features
        out.append(f"lacks {', '.join(missing)}")
    if not out and row.level is Level.UNSUPPORTED:
        out.append(row.note or "declared as unsupported")
    return out


def find(rows: Iterable[Support], need: Need) -> Support:
    """Return the best row for `need` (native before reference, earlier before later).

    Raises:
        Unsupported: no row covers it; the message is `explain`'s.
    """
    rows = tuple(rows)
    fitting = [row for row in rows if not mismatches(row, need)]
    if not fitting:
        raise Unsupported(explain(rows, need))
    return min(fitting, key=lambda row: row.level is not Level.NATIVE)


def explain(rows: Sequence[Support], need: Need) -> str:
    """Say why no row covers `need`: one line a row with its first mismatch, nearest row first."""
    weights = f"{need.scheme} in {need.weights}" if need.scheme else need.weights
    cache = f", KV cache in {need.kv_cache}" if need.kv_cache else ""
    about = f"{need.attention}, {weights}, head size {need.head_dim}{cache}"
    asked = f"{need.task.value} with {need.architecture} ({about})"
    lines = [f"no support for {asked}:"]
    lines += [f"  - {row}: {reason}" for row, reason in refusals(rows, need)]
    if not rows:
        lines.append("  - this backend declares no support at all")
    return "\n".join(lines)


def refusals(rows: Iterable[Support], need: Need) -> list[tuple[str, str]]:
    """Return each row that does not cover `need`, described, with its first mismatch.

    The nearest row comes first: one that fits and says why such things are refused, then those with few mismatches.
    """
    ranked = sorted(rows, key=lambda row: len(mismatches(replace(row, level=Level.REFERENCE), need)))
    return [(describe(row), reasons[0]) for row in ranked if (reasons := mismatches(row, need))]


def describe(row: Support) -> str:
    """Name a row in a few words."""
    tasks = "/".join(task.value for task in row.tasks)
    schemes = f", {'/'.join(row.schemes)}" if row.schemes else ""
    caches = f", KV cache {'/'.join(row.kv_caches)}" if row.kv_caches else ""
    return f"{tasks}, {row.attention}, {'/'.join(row.weights)}{schemes}{caches}"
