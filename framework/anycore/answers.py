"""A question about a model, and what one backend answers: by the functions that `serve` starts with. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anycore import evidence
from anycore.choose import choose
from anycore.config import ModelConfig
from anycore.contract.declare import BackendSpec, Device, Need, Probe, Support, Task, describe, refusals
from anycore.engine.launch import needs_of, prefer_native, task_of
from anycore.engine.tasks import check_length
from anycore.errors import ConfigError, PluginError, TaskNotSupported, Unsupported
from anycore.models.parallel import shard
from anycore.models.source import Progress, Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. The defaults are those of `serve`."""

    model: str
    task: str = "auto"
    backend: str | None = None  # None: every backend
    chip: str | None = None  # None: that of the device here, or any where there is none
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    features: tuple[str, ...] = ()  # beyond what the model itself needs
    max_model_len: int | None = None
    prefix_caching: bool = True
    revision: str | None = None
    tensor_parallel_size: int = 1

    def config(self) -> ModelConfig:
        """The settings that `serve` would get."""
        return ModelConfig(
            model=self.model,
            task=self.task,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            revision=self.revision,
            tensor_parallel_size=self.tensor_parallel_size,
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """A question that gets a yes, and how it differs from the one that was asked."""

    changes: tuple[str, ...]
    backend: str
    level: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What one backend says."""

    backend: str
    supported: bool
    device: str | None  # the device here that it is about; None: an assumed one
    absent: str = ""  # why there is no device here
    task: str = ""
    dtype: str = ""
    scheme: str = ""  # how weights are held; "": dense
    kv_cache: str = ""  # how the KV cache is rounded; "": it is not
    level: str = ""
    evidence: str = ""
    row: Support | None = None  # the row in force
    reasons: tuple[tuple[str, str], ...] = ()  # of a no: each row with its first mismatch, the nearest row first
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as its small files tell; `refusal` where they say that no backend can compute it."""

    source: Source
    spec: ModelSpec | None
    refusal: str = ""


def read(question: Question, plugins: Plugins, progress: Progress | None = None) -> Model:
    """Read what describes a model; its weights are not fetched.

    Raises:
        SourceError, ConfigError: it cannot be found, or its files contradict themselves.
    """
    source = locate(question.model, revision=question.revision, weights=False, progress=progress)
    try:
        return Model(source, read_spec(source, plugins.architectures()))
    except Unsupported as error:
        return Model(source, None, error.message)


def answer(question: Question, plugins: Plugins, model: Model) -> Answer:
    """Ask the one backend that the question names."""
    spec = plugins.backend(question.backend or "auto")
    probe = spec.probe()
    device = next((d for d in probe.devices if question.chip in (None, d.chip)), None)
    absent = "" if device else _absence(question, probe)
    here = Answer(spec.name, False, f"{device.name} (chip {device.chip})" if device else None, absent)
    if model.spec is None:
        return replace(here, reasons=(("model", model.refusal),))
    try:
        if question.max_model_len is not None:
            check_length(question.max_model_len, model.spec)
        task = task_of(question.config(), model.spec)
        shard(model.spec, 0, question.tensor_parallel_size)
    except (ConfigError, TaskNotSupported) as error:
        return replace(here, reasons=(("model", error.message),))
    chip = device.chip if device else question.chip
    here = replace(here, task=task.value)
    needs = needs_on(question, model, task, chip)
    # The device that is asked about, present or not, alone: what `serve` finds where it is.
    assumed = seen_as(spec, Probe(devices=(Device(0, "", chip or ""),)))
    try:
        choice = choose(replace(plugins, backends=(assumed,), failures=()), lambda _: needs, spec.name)
    except (Unsupported, PluginError):
        here = replace(here, dtype=needs[0].weights, scheme=needs[0].scheme or "", kv_cache=needs[0].kv_cache or "")
        return replace(here, reasons=tuple(refusals(spec.support, needs[0])))
    choice = prefer_native(choice, lambda _: needs)
    row = choice.support
    return replace(
        here,
        supported=True,
        dtype=choice.need.weights,
        scheme=choice.need.scheme or "",
        kv_cache=choice.need.kv_cache or "",
        level=row.level.value,
        evidence=evidence.of_row(spec, row, chip),
        row=row,
    )


def needs_on(question: Question, model: Model, task: Task, chip: str | None) -> Sequence[Need]:
    """What is asked of a backend's table, best data type first."""
    assert model.spec is not None
    wanted = needs_of(question.config(), model.source, model.spec.for_task(task), task)(Device(0, "", chip or ""))
    needs = [wanted] if isinstance(wanted, Need) else list(wanted)
    features = {need: tuple(dict.fromkeys((*need.features, *question.features))) for need in needs}
    return [replace(need, chip=chip, features=features[need]) for need in needs]


def seen_as(spec: BackendSpec, probe: Probe) -> BackendSpec:
    """The same backend on a machine where this is what its probe finds."""
    return replace(spec, probe=lambda: probe)


def _absence(question: Question, probe: Probe) -> str:
    """Why the answer is about an assumed device."""
    if not probe.devices:
        return probe.reason or "no device found"
    seen = ", ".join(dict.fromkeys(device.chip for device in probe.devices))
    return f"chip {question.chip} asked about, chips here: {seen}"


def sentence(found: Answer) -> str:
    """Say an answer in a line."""
    where = f" on {found.device}" if found.device else ""
    if not found.supported:
        return f"{found.backend}: no{where}"
    assert found.row is not None
    held = f"{found.scheme} in {found.dtype}" if found.scheme else found.dtype
    held += f", KV cache in {found.kv_cache}" if found.kv_cache else ""
    chips = f", chips {', '.join(found.row.chips)}" if found.row.chips and not found.device else ""
    return (
        f"{found.backend}: yes{where}: {found.task} in {held}, {found.level} "
        f"(row {describe(found.row)}{chips}), {found.evidence}"
    )
