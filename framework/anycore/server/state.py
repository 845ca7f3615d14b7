"""What the routes share: the served models, who may call, what is counted, and how a model is found by its name."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request

from anycore.config import ModelConfig, ServerConfig
from anycore.contract.declare import Task
from anycore.engine.defaults import SamplingDefaults, sampling_defaults
from anycore.engine.tasks import cannot
from anycore.errors import BadRequest, ModelNotFound, TaskNotSupported, Unavailable, Unsupported
from anycore.models.source import Source
from anycore.models.spec import read_spec
from anycore.server import wire
from anycore.server.auth import Guard
from anycore.server.metrics import Metrics
from anycore.server.phases import BEHIND, Phase
from anycore.server.slot import Slot
from anycore.text.kept import WEIGHTS

if TYPE_CHECKING:
    from anycore.models.spec import ModelSpec
    from anycore.plugins import Plugins
    from anycore.text.render import Renderer
    from anycore.text.replies.form import Formats

Stamp = tuple[wire.Planned, tuple[tuple[str, int, int], ...]]
MAX_NAME = 256  # characters of a model name in a request


@dataclass(frozen=True)
class Reading:
    """What the front reads of a model: what it needs to render input and to check requests."""

    source: Source
    spec: ModelSpec
    renderer: Renderer
    sampling_defaults: SamplingDefaults
    formats: Formats  # of tool calls and reasoning


def read(config: ModelConfig, plan: wire.Planned, plugins: Plugins, request_templates: bool) -> Reading:
    """Read spec, tokenizer and templates, sampling defaults. Slow: call it in a thread.

    Raises:
        AnycoreError: a file or a setting is wrong.
    """
    source = Source(plan.source, Path(plan.folder), Path(plan.gguf) if plan.gguf else None)
    return reading_of(config, source, plan.card["max_model_len"], plugins, request_templates)


def stamp_of(config: ModelConfig, plan: wire.Planned) -> Stamp:
    """Say what a reading is of, without reading it: the model as planned, and when its small files last changed."""
    folder = Path(plan.folder)
    if plan.gguf is not None:
        paths = [Path(plan.gguf)]
    else:
        paths = sorted(p for p in chain(folder.glob("*"), folder.glob("*/*")) if not p.name.endswith(WEIGHTS))
    if config.chat_template is not None:
        paths.append(Path(config.chat_template).expanduser())
    found = []
    for path in paths:
        with suppress(OSError):  # it is gone, and what reads it will say so
            stat = path.stat()
            found.append((str(path), stat.st_mtime_ns, stat.st_size))
    return plan, tuple(found)


def reading_of(
    config: ModelConfig, source: Source, max_model_len: int, plugins: Plugins, request_templates: bool
) -> Reading:
    """`read` for a model that has been located."""
    from anycore.text.render import Renderer
    from anycore.text.replies.form import Formats

    spec = read_spec(source, plugins.architectures())
    defaults = sampling_defaults(
        source.read_object("generation_config.json"), config.override_generation_config, config.generation_config
    )
    renderer = Renderer(source, spec, max_model_len, config.chat_template, request_templates)
    formats = Formats(
        renderer.tokenizer, renderer.templates, plugins.formats, config.tool_parser, config.reasoning_parser
    )
    return Reading(source, spec, renderer, defaults, formats)


@dataclass
class ServedModel:
    """One model: the slot of its engine, and what renders its input, which is read while the engine loads."""

    slot: Slot
    reading: Reading | None = None
    stamp: Stamp | None = None  # of what was read

    @property
    def names(self) -> tuple[str, ...]:
        """Names clients may use, the canonical one first."""
        return self.slot.config.names

    @property
    def card(self) -> dict[str, Any]:
        """What /v1/models says; {} before the model is planned."""
        return self.slot.card

    @property
    def task(self) -> Task:
        return Task(self.card["tasks"][0])

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output."""
        return int(self.card["max_model_len"])

    @property
    def window(self) -> int:
        """Engine requests that one HTTP request may have under way at a time: as many as the engine runs at once."""
        return int(self.card["max_num_seqs"])

    @property
    def source(self) -> Source:
        return self._read.source

    @property
    def spec(self) -> ModelSpec:
        return self._read.spec

    @property
    def renderer(self) -> Renderer:
        return self._read.renderer

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self._read.sampling_defaults

    @property
    def formats(self) -> Formats:
        return self._read.formats

    @property
    def _read(self) -> Reading:
        if self.reading is None:
            raise self.slot.refusal()
        return self.reading

    @property
    def remote(self) -> bool:
        """Whether another server answers for it: then nothing of it is read here."""
        return self.slot.config.url is not None

    @property
    def ready(self) -> bool:
        """Whether a request would be answered at once."""
        return self.slot.serves and (self.remote or self.reading is not None)

    def check_ready(self) -> None:
        """Raise Unavailable unless the model can take requests, at once or after a wait."""
        if not self.slot.takes or not (self.remote or self.reading is not None):
            raise self.slot.refusal()


@dataclass
class ServerState:
    """The server as one object; routes get it through `Depends(state_of)`."""

    config: ServerConfig
    models: list[ServedModel]
    guard: Guard
    metrics: Metrics
    plugins: Plugins | None = None  # None until they are loaded
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def phase(self) -> Phase:
        """Return dead, draining, or the phase of the model that is furthest behind; unloaded ones are not behind."""
        phases = [model.slot.status.phase for model in self.models]
        if Phase.DEAD in phases:
            return Phase.DEAD
        if self.draining:
            return Phase.DRAINING
        return min((phase for phase in phases if phase is not Phase.UNLOADED), key=BEHIND.index, default=Phase.READY)

    @property
    def ready(self) -> bool:
        """Whether every model that is not unloaded answers requests, be it with a part of its replicas."""
        slots = [model.slot for model in self.models]
        answers = all(slot.serves or slot.status.phase is Phase.UNLOADED for slot in slots)
        return answers and self.phase not in (Phase.DEAD, Phase.DRAINING)


def state_of(request: Request) -> ServerState:
    """Return the state of the app that got this request."""
    state: ServerState = request.app.state.anycore
    return state


def named(state: ServerState, name: str) -> ServedModel:
    """Return the model of a name or alias, which is compared exactly; nothing is looked up on disk.

    Raises:
        ModelNotFound: there is none; the message lists those there are.
    """
    for model in state.models:
        if name in model.names:
            return model
    asked = repr(name) if len(name) <= MAX_NAME else f"with a name of {len(name)} characters"
    served = ", ".join(name for model in state.models for name in model.names)
    raise ModelNotFound(f"there is no model {asked} here; served: {served}", param="model")


def resolve_model(state: ServerState, name: str | None, *tasks: Task) -> ServedModel:
    """Return the model a request names, if it serves one of `tasks` and is ready.

    Without a name it is the only model that serves one of them.

    Raises:
        Unavailable: draining or still loading.
        ModelNotFound: no such model; the message lists those there are.
        TaskNotSupported: the model serves another task; the message names the models that would do.
    """
    if state.draining:
        raise Unavailable("the server is shutting down and takes no new requests", code="shutting_down")
    if name is None:
        return _only_model(state, tasks)
    model = named(state, name)
    model.check_ready()
    if model.task not in tasks:
        raise _wrong_task(state, name, model, tasks)
    if model.remote:
        raise Unsupported(f"model {name!r} is served by {model.slot.config.url}, to which this route is not passed on")
    return model


def _only_model(state: ServerState, tasks: tuple[Task, ...]) -> ServedModel:
    for model in state.models:
        if not model.card:  # nobody knows yet what it is for
            model.check_ready()
    fitting = [model for model in state.models if model.task in tasks]
    if len(fitting) == 1:
        fitting[0].check_ready()
        return fitting[0]
    if not fitting and len(state.models) == 1:
        raise _wrong_task(state, state.models[0].names[0], state.models[0], tasks)
    names = ", ".join(f"{model.names[0]} ({model.task.value})" for model in fitting or state.models)
    raise BadRequest(f"say which model: {names}", param="model", code="missing_required_parameter")


def _wrong_task(state: ServerState, name: str, model: ServedModel, tasks: tuple[Task, ...]) -> TaskNotSupported:
    wanted = " or ".join(task.value for task in tasks)
    if model.remote:
        return TaskNotSupported(
            f"model {name!r} of {model.slot.config.url} is passed on for {model.task.value}, this route needs {wanted}",
            param="model",
        )
    able = [task.value for task in model.spec.tasks]
    parts = [f"model {name!r} is served for {model.task.value}, this route needs {wanted}"]
    others = [other.names[0] for other in state.models if other.card and other.task in tasks]
    if others:
        parts.append(f"use {' or '.join(others)}")
    flags = [f"--task {task.value}" for task in tasks if task.value in able]
    if flags:
        parts.append(f"or start the server with {' or '.join(flags)}")
    else:
        parts.append(f"{cannot(model.spec, *tasks)} (--task chooses)")
    return TaskNotSupported("; ".join(parts), param="model")
