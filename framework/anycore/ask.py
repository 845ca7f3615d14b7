"""Will this model run, on which backend, and if not, what is the least that has to change? From small files alone.

`answers.py` asks one backend; here all are asked, and the nearest questions that get a yes are looked for. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import msgspec

from anycore.answers import Alternative, Answer, Model, Question, answer, needs_on, read, seen_as
from anycore.contract.declare import DTYPES, FEATURES, BackendSpec, Task, mismatches
from anycore.contract.formats import KV_CACHES
from anycore.engine.launch import task_of
from anycore.errors import ConfigError, Unsupported
from anycore.models.quantization import ONLINE, schemes
from anycore.models.spec import ModelSpec
from anycore.plugins import Plugins

MOST_CHANGES = 3
MOST_ALTERNATIVES = 5


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


def check(question: Question, plugins: Plugins, model: Model) -> Report:
    """Ask the backend that the question names, those whose tables name its chip, or every one.

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
    named = question.backend is not None or question.chip is not None
    asked = [plugins.backend(question.backend)] if question.backend is not None else _those_of(question.chip, plugins)
    answers = []
    for spec in asked:
        own = replace(question, backend=spec.name)
        found = answer(own, plugins, model)
        if not found.supported and model.spec is not None:
            found = replace(found, alternatives=tuple(alternatives(own, plugins, model, elsewhere=named)))
        answers.append(found)
    if model.spec is None:
        return Report(question, None, (), tuple(answers))
    tasks = tuple(task.value for task in model.spec.tasks)
    return Report(question, model.spec.architecture, tasks, tuple(answers))


def _those_of(chip: str | None, plugins: Plugins) -> list[BackendSpec]:
    """The backends that a chip is for: one whose rows are for any chip does not answer for what others drive.

    Raises:
        ConfigError: none of them knows it by this name.
    """
    if chip is None:
        return list(plugins.backends)
    chips = {spec.name: dict.fromkeys(chip for row in spec.support for chip in row.chips) for spec in plugins.backends}
    found = [spec for spec in plugins.backends if chip in chips[spec.name]]
    if not found:
        known = ", ".join(dict.fromkeys(name for names in chips.values() for name in names))
        raise ConfigError(
            f"there is no chip {chip!r} in any backend's table; there are {known}. Of another one, ask a backend: "
            "--backend NAME",
            param="chip",
        )
    return found


def covered_rows(question: Question, plugins: Plugins) -> dict[str, set[int]]:
    """Return for each backend which rows of its table cover a model, on whatever chip and in whatever type."""
    model = read(question, plugins)
    if model.spec is None:
        raise Unsupported(model.refusal, param="model")
    tasks = model.spec.tasks if question.task == "auto" else (task_of(question.config(), model.spec),)
    kinds = [replace(question, task=task.value, dtype=dtype) for task in tasks for dtype in DTYPES]
    needs = [need for kind in kinds for need in needs_on(kind, model, Task(kind.task), None)]
    return {
        spec.name: {
            number for number, row in enumerate(spec.support) if any(not mismatches(row, need) for need in needs)
        }
        for spec in plugins.backends
    }


def alternatives(question: Question, plugins: Plugins, model: Model, elsewhere: bool) -> Iterator[Alternative]:
    """Yield the nearest questions that get a yes, the fewest and lightest changes first; each is asked, not assumed.

    The question names its backend; `elsewhere` lets that change, too.
    """
    assert model.spec is not None
    single = list(_changes(question, plugins, model.spec, elsewhere))
    enough: list[set[str]] = []
    for count in range(1, MOST_CHANGES + 1):
        for chosen in sorted(combinations(single, count), key=lambda changes: sum(c.weight for c in changes)):
            words = {change.words for change in chosen}
            if len({change.field for change in chosen}) < count or any(less <= words for less in enough):
                continue
            other = question
            for change in chosen:
                other = change.apply(other)
            found = answer(other, plugins, model)
            if found.supported:
                enough.append(words)
                yield Alternative(tuple(change.words for change in chosen), found.backend, found.level)
                if len(enough) == MOST_ALTERNATIVES:
                    return


@dataclass(frozen=True, slots=True)
class _Change:
    """One difference from a question; of changes of the same field only one is made at a time."""

    weight: int
    words: str
    field: str
    apply: Callable[[Question], Question]


def _set(weight: int, words: str, **values: Any) -> _Change:
    return _Change(weight, words, next(iter(values)), lambda question: replace(question, **values))


def _without(feature: str, question: Question) -> Question:
    return replace(question, features=tuple(name for name in question.features if name != feature))


def _changes(question: Question, plugins: Plugins, model: ModelSpec, elsewhere: bool) -> Iterator[_Change]:
    """Every single change, each with how much it matters to whoever asked."""
    spec = plugins.backend(question.backend or "auto")
    yield from (_set(1, f"--dtype {dtype}", dtype=dtype) for dtype in DTYPES if dtype != question.dtype)
    asked = schemes(question.quantization, model.stored)[0]
    if asked is not None:
        for scheme in ("none", *ONLINE):
            if scheme != asked:  # dense is nearer to a checkpoint's own than other rounding is, but larger
                weight = 1 if (scheme == "none") == (question.quantization == "auto") else 2
                yield _set(weight, f"--quantization {scheme}", quantization=scheme)
    if question.kv_cache_dtype != "auto":
        for kind in (*KV_CACHES, "auto"):  # another rounding is as small, the type of the weights is not
            if kind != question.kv_cache_dtype:
                yield _set(2 if kind == "auto" else 1, f"--kv-cache-dtype {kind}", kv_cache_dtype=kind)
    if question.max_model_len is not None and question.max_model_len > model.max_positions:
        yield _set(1, f"--max-model-len {model.max_positions}", max_model_len=model.max_positions)
    for name in question.features:
        yield _Change(2, f"without {name}", name, partial(_without, name))
    if question.prefix_caching:
        yield _set(2, "--no-enable-prefix-caching", prefix_caching=False)
    if elsewhere:
        for other in plugins.backends:
            if other is not spec:
                weight = 3 if other.probe().available else 6  # one that is not here is the last resort
                yield _set(weight, f"--backend {other.name}", backend=other.name, chip=None)
    if question.chip is not None:
        for chips in _alike(spec):
            if question.chip not in chips:
                yield _set(4, f"chip {' or '.join(chips)}", chip=chips[0])
    for task in model.tasks:
        if task.value != question.task:
            yield _set(5, f"--task {task.value}", task=task.value)


def _probed(plugins: Plugins) -> Plugins:
    """The same plugins, looked at once: alternatives ask their backends again and again."""
    return replace(plugins, backends=tuple(seen_as(spec, spec.probe()) for spec in plugins.backends))


def _alike(spec: BackendSpec) -> Iterable[list[str]]:
    """The chips that a table names, those that the same rows name together."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for chip in dict.fromkeys(chip for row in spec.support for chip in row.chips):
        rows = tuple(number for number, row in enumerate(spec.support) if chip in row.chips)
        groups.setdefault(rows, []).append(chip)
    return groups.values()
