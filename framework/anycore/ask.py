"""Will this model run, on which backend, and if not, what is the least that has to change? From small files alone.

A question is answered by the functions that `serve` starts with, so that both say the same. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec

from anycore import evidence
from anycore.choose import choose
from anycore.config import ModelConfig
from anycore.contract.declare import (
    DTYPES,
    FEATURES,
    BackendSpec,
    Device,
    Need,
    Probe,
    Support,
    Task,
    describe,
    mismatches,
    refusals,
)
from anycore.engine.launch import needs_of, prefer_native, task_of
from anycore.engine.tasks import check_length
from anycore.errors import ConfigError, PluginError, TaskNotSupported, Unsupported
from anycore.models.source import Progress, Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.plugins import Plugins

MOST_CHANGES = 3
MOST_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. The defaults are those of `serve`."""

    model: str
    task: str = "auto"
    backend: str | None = None  # None: every backend
    chip: str | None = None  # None: that of the device here, or any where there is none
    dtype: str = "auto"
    quantization: str | None = None
    features: tuple[str, ...] = ()  # beyond what the model itself needs
    max_model_len: int | None = None
    prefix_caching: bool = True
    revision: str | None = None

    def config(self) -> ModelConfig:
        """The settings that `serve` would get."""
        return ModelConfig(
            model=self.model,
            task=self.task,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.prefix_caching,
            revision=self.revision,
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


@dataclass(frozen=True, slots=True)
class Report:
    """The answers to a question; yes if one backend says so."""

    question: Question
    architecture: str | None
    possible_tasks: tuple[str, ...]
    answers: tuple[Answer, ...]
    supported: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "supported", any(answer.supported for answer in self.answers))

    def as_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


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


def check(question: Question, plugins: Plugins, model: Model) -> Report:
    """Ask the backend that the question names, or every one.

    Raises:
        PluginError: there is no backend of that name.
        ConfigError: a feature, or another word of the question, is not one.
    """
    question.config()
    question = replace(question, features=tuple(dict.fromkeys(question.features)))
    plugins = _probed(plugins)
    for name in question.features:
        if name not in FEATURES:
            raise ConfigError(f"there is no feature {name!r}; there are {', '.join(FEATURES)}", param="features")
    named = question.backend is not None
    asked = [plugins.backend(question.backend)] if question.backend is not None else list(plugins.backends)
    answers = []
    for spec in asked:
        found = answer(replace(question, backend=spec.name), plugins, model)
        if not found.supported and model.spec is not None:
            found = replace(found, alternatives=tuple(alternatives(question, spec, plugins, model, named)))
        answers.append(found)
    spec_of = model.spec
    tasks = tuple(task.value for task in spec_of.tasks) if spec_of else ()
    return Report(question, spec_of.architecture if spec_of else None, tasks, tuple(answers))


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
    except (ConfigError, TaskNotSupported) as error:
        return replace(here, reasons=(("model", error.message),))
    chip = device.chip if device else question.chip
    here = replace(here, task=task.value)
    needs = _needs(question, model, task, chip)
    # The device that is asked about, present or not, alone: what `serve` finds where it is.
    assumed = _seen(spec, Probe(devices=(Device(0, "", chip or ""),)))
    try:
        choice = choose(replace(plugins, backends=(assumed,), failures=()), lambda _: needs, spec.name)
    except (Unsupported, PluginError):
        return replace(here, dtype=needs[0].weights, reasons=tuple(refusals(spec.support, needs[0])))
    choice = prefer_native(choice, lambda _: needs)
    row = choice.support
    return replace(
        here,
        supported=True,
        dtype=choice.need.weights,
        level=row.level.value,
        evidence=evidence.of_row(spec, row, chip),
        row=row,
    )


def covered_rows(question: Question, plugins: Plugins) -> dict[str, set[int]]:
    """Return for each backend which rows of its table cover a model, on whatever chip and in whatever type."""
    model = read(question, plugins)
    if model.spec is None:
        raise Unsupported(model.refusal, param="model")
    tasks = model.spec.tasks if question.task == "auto" else (task_of(question.config(), model.spec),)
    kinds = [replace(question, task=task.value, dtype=dtype) for task in tasks for dtype in DTYPES]
    needs = [need for kind in kinds for need in _needs(kind, model, Task(kind.task), None)]
    return {
        spec.name: {
            number for number, row in enumerate(spec.support) if any(not mismatches(row, need) for need in needs)
        }
        for spec in plugins.backends
    }


def alternatives(
    question: Question, spec: BackendSpec, plugins: Plugins, model: Model, elsewhere: bool
) -> Iterator[Alternative]:
    """Yield the nearest questions that get a yes, the fewest and lightest changes first; each is asked, not assumed.

    `elsewhere` lets the backend change, too.
    """
    assert model.spec is not None
    single = list(_changes(replace(question, backend=spec.name), spec, plugins, model.spec, elsewhere))
    enough: list[set[str]] = []
    for count in range(1, MOST_CHANGES + 1):
        ranked = sorted(combinations(single, count), key=lambda chosen: sum(change.weight for change in chosen))
        for chosen in ranked:
            words = {change.words for change in chosen}
            fields = [name for change in chosen for name in change.values]
            if len(set(fields)) < len(fields) or any(less <= words for less in enough):
                continue
            other = replace(question, backend=spec.name)
            for change in chosen:
                # Features are left out one by one; everything else is set.
                other = replace(other, **change.applied(other))
            found = answer(other, plugins, model)
            if found.supported:
                enough.append(words)
                yield Alternative(tuple(change.words for change in chosen), found.backend, found.level)
                if len(enough) == MOST_ALTERNATIVES:
                    return


@dataclass(frozen=True, slots=True)
class _Change:
    """One difference from a question. `values` maps fields to values; a feature "-NAME" is one to do without."""

    weight: int
    words: str
    values: dict[str, Any]

    def applied(self, question: Question) -> dict[str, Any]:
        kept = {name: value for name, value in self.values.items() if not name.startswith("-")}
        left = tuple(name for name in question.features if f"-{name}" not in self.values)
        return {**kept, "features": left}


def _changes(
    question: Question, spec: BackendSpec, plugins: Plugins, model: ModelSpec, elsewhere: bool
) -> Iterator[_Change]:
    """Every single change, each with how much it matters to whoever asked."""
    if question.quantization is not None:
        yield _Change(1, "no --quantization", {"quantization": None})
    else:
        for dtype in DTYPES:
            if dtype != question.dtype:
                yield _Change(1, f"--dtype {dtype}", {"dtype": dtype})
    if question.max_model_len is not None and question.max_model_len > model.max_positions:
        yield _Change(1, f"--max-model-len {model.max_positions}", {"max_model_len": model.max_positions})
    for name in question.features:
        yield _Change(2, f"without {name}", {f"-{name}": None})
    if question.prefix_caching:
        yield _Change(2, "--no-enable-prefix-caching", {"prefix_caching": False})
    if elsewhere:
        for other in plugins.backends:
            if other is not spec:
                weight = 3 if other.probe().available else 6  # one that is not here is the last resort
                yield _Change(weight, f"--backend {other.name}", {"backend": other.name, "chip": None})
    if question.chip is not None:
        for chips in _alike(spec):
            if question.chip not in chips:
                yield _Change(4, f"chip {' or '.join(chips)}", {"chip": chips[0]})
    for task in model.tasks:
        if task.value != question.task:
            yield _Change(5, f"--task {task.value}", {"task": task.value})


def _probed(plugins: Plugins) -> Plugins:
    """The same plugins, looked at once: alternatives ask their backends again and again."""
    return replace(plugins, backends=tuple(_seen(spec, spec.probe()) for spec in plugins.backends))


def _seen(spec: BackendSpec, probe: Probe) -> BackendSpec:
    return replace(spec, probe=lambda: probe)


def _alike(spec: BackendSpec) -> Iterable[list[str]]:
    """The chips that a table names, those that the same rows name together."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for chip in dict.fromkeys(chip for row in spec.support for chip in row.chips):
        rows = tuple(number for number, row in enumerate(spec.support) if chip in row.chips)
        groups.setdefault(rows, []).append(chip)
    return groups.values()


def _needs(question: Question, model: Model, task: Task, chip: str | None) -> Sequence[Need]:
    """What is asked of a backend's table, best data type first."""
    assert model.spec is not None
    wanted = needs_of(question.config(), model.source, model.spec.for_task(task), task)(Device(0, "", chip or ""))
    needs = [wanted] if isinstance(wanted, Need) else list(wanted)
    features = {need: tuple(dict.fromkeys((*need.features, *question.features))) for need in needs}
    needs = [replace(need, chip=chip, features=features[need]) for need in needs]
    if question.quantization is not None:
        needs = [replace(needs[0], weights=question.quantization)]
    return needs


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
    chips = f", chips {', '.join(found.row.chips)}" if found.row.chips and not found.device else ""
    return (
        f"{found.backend}: yes{where}: {found.task} in {found.dtype}, {found.level} "
        f"(row {describe(found.row)}{chips}), {found.evidence}"
    )
