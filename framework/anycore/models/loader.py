"""From a located model to a running one: every parameter loaded or tied, nothing damaged, nothing left as it was."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend
from anycore.contract.weights import DenseWeight
from anycore.errors import WeightsError
from anycore.models.decoder import Decoder
from anycore.models.encoder import Encoder
from anycore.models.layers import Dense
from anycore.models.checkpoint import Checkpoint, open_checkpoint
from anycore.models.parameters import Parameter, canonical, dense, parameters
from anycore.models.shards import Safetensors
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec
from anycore.models.whole import WholeModel, forward_of

log = logging.getLogger(__name__)

Model = Decoder | Encoder | WholeModel

DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
READERS = 4
"""Threads that copy tensors out of the files, which is when these are read, and cast them."""
AHEAD = 1 << 30
"""Bytes they may be ahead of the device: the host's memory never holds a whole model."""
NAMED = 8
"""How many tensors a message names before it only counts them."""


UNUSED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$|^(pooler|cls|lm_head)\.")
"""Tensors that a checkpoint may well hold though nothing here reads them: buffers, and heads of other uses."""


def load(source: Source, spec: ModelSpec, backend: Backend, dtype: str, progress: Progress | None = None) -> Model:
    """Load a model onto the backend's device, casting its weights to `dtype`.

    Raises:
        WeightsError: files are damaged or incomplete; raised before any weight is read.
    """
    whole = forward_of(backend, source, spec, dtype, progress)
    if whole is not None:
        return WholeModel(spec, whole, dense_modules(source, spec, backend))
    checkpoint = open_checkpoint(source)
    weights = fill(parameters(spec), checkpoint, spec.architecture, backend, dtype, progress)
    if spec.head == "lm" and spec.tied:
        tie(weights, source)
    build = Decoder if spec.family == "decoder" else Encoder
    return build(spec, weights, backend.ops, dense_modules(source, spec, backend))


def dense_modules(source: Source, spec: ModelSpec, backend: Backend) -> list[Dense]:
    """The modules of sentence-transformers that follow pooling."""
    modules: list[Dense] = []
    for module, wanted in dense(spec):
        part = fill(wanted, Safetensors(source.folder / module.folder), module.folder, backend, "float32", None)
        modules.append(Dense(backend.ops, part, module))
    return modules


def check(source: Source, spec: ModelSpec) -> None:
    """Check the weight files as `load` does, from their headers alone.

    Raises:
        WeightsError: see `load`.
    """
    checkpoint = open_checkpoint(source)
    match(parameters(spec), checkpoint, spec.architecture)
    for module, wanted in dense(spec):
        match(wanted, Safetensors(source.folder / module.folder), module.folder)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor goes: rows `first` to `first + rows` of a parameter."""

    parameter: Parameter
    first: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.parameter.shape[1:])

    @property
    def size(self) -> int:
        return prod(self.shape)


def match(wanted: list[Parameter], checkpoint: Checkpoint, what: str) -> dict[str, Place]:
    """Return the place of each checkpoint tensor that is wanted.

    Raises:
        WeightsError: a tensor is missing, there twice, or of another shape.
    """
    places: dict[str, Place] = {}
    for parameter in wanted:
        first = 0
        for name, rows in parameter.parts:
            places[name] = Place(parameter, first, rows)
            first += rows
    found: dict[str, str] = {}
    for name, shape in checkpoint.shapes.items():
        plain = canonical(name)
        if plain not in places:
            continue
        if plain in found:
            raise WeightsError(f"{checkpoint.file_of(name)}: {name} and {found[plain]} are the same tensor twice")
        found[plain] = name
        if tuple(shape) != places[plain].shape:
            raise WeightsError(
                f"{checkpoint.file_of(name)}: {name} has shape {list(shape)}, but config.json makes it "
                f"{list(places[plain].shape)}: the two do not belong together"
            )
    missing = [name for name, place in places.items() if name not in found and not place.parameter.optional]
    if missing:
        raise WeightsError(missing_message(missing, places, checkpoint, what))
    return {name: places[plain] for plain, name in found.items()}


def missing_message(missing: list[str], places: dict[str, Place], checkpoint: Checkpoint, what: str) -> str:
    files = sorted({checkpoint.file_of(name) for name in checkpoint.shapes})
    text = f"{some(files)}: {len(missing)} of {len(places)} tensors of {what} are missing: {some(missing)}"
    if missing == ["lm_head.weight"]:
        text += ' (config.json does not say "tie_word_embeddings": true, so the head is a matrix of its own)'
    return text


def some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def fill(
    wanted: list[Parameter],
    checkpoint: Checkpoint,
    what: str,
    backend: Backend,
    dtype: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Return finished parameters by name: cast, fused, on the device, and packed where `ops.linear` takes them."""
    places = match(wanted, checkpoint, what)
    extra = [name for name in checkpoint.shapes if name not in places and not UNUSED.search(canonical(name))]
    if extra:
        log.warning("%d tensors of the checkpoint are not used by %s: %s", len(extra), what, some(extra))
    total = sum(place.size for place in places.values())
    lacking_rows: dict[str, int] = {}  # of parameters under way
    finished: dict[str, Any] = {}
    done = 0
    for place, host in copied(places, checkpoint, dtype):
        parameter = place.parameter
        left = lacking_rows.pop(parameter.name, parameter.shape[0]) - place.rows
        if left:
            lacking_rows[parameter.name] = left
        else:
            weight = backend.memory.upload(host)
            finished[parameter.name] = backend.ops.pack(DenseWeight(weight)) if parameter.packed else weight
        done += place.size
        if progress is not None:
            progress("weights", done / total)
    lacking = [p.name for p in wanted if p.name not in finished and not p.optional]
    if lacking:
        raise WeightsError(f"{what}: the checkpoint listed but did not give {some(lacking)}")
    return finished


def copied(places: dict[str, Place], checkpoint: Checkpoint, dtype: str) -> Iterator[tuple[Place, Tensor]]:
    """Yield each tensor's place once its rows are in the host's copy of the parameter, which comes with it.

    Several threads copy ahead of the caller, who sends what is whole to the device meanwhile.
    """
    begun: dict[str, tuple[Tensor, int]] = {}  # parameters, and the rows still to come
    under_way: deque[tuple[Future[Tensor], Place, Tensor]] = deque()
    ahead = 0  # bytes

    def oldest() -> tuple[Place, Tensor]:
        nonlocal ahead
        copy, place, host = under_way.popleft()
        ahead -= copy.result().nbytes
        return place, host

    with ThreadPoolExecutor(READERS, "weights") as readers:
        for name, tensor in checkpoint.tensors():
            place = places.get(name)
            if place is None:
                continue
            if tensor.dtype not in DENSE:
                raise WeightsError(
                    f"{checkpoint.file_of(name)}: {name} is {tensor.dtype}: quantised weights are not supported"
                )
            parameter = place.parameter
            if parameter.name not in begun:
                target = getattr(torch, "float32" if parameter.exact else dtype)
                with torch.inference_mode(False):  # which other threads are not in
                    begun[parameter.name] = torch.empty(parameter.shape, dtype=target), parameter.shape[0]
            host, left = begun.pop(parameter.name)
            if left > place.rows:
                begun[parameter.name] = host, left - place.rows
            rows = host[place.first : place.first + place.rows]
            under_way.append((readers.submit(rows.copy_, tensor), place, host))
            ahead += rows.nbytes
            while ahead > AHEAD:
                yield oldest()
        while under_way:
            yield oldest()


def tie(weights: dict[str, Any], source: Source) -> None:
    """Drop a head that equals the embedding table it is tied to; keep one that differs, and say so."""
    head = weights.get("lm_head.weight")
    if head is None:
        return
    if torch.equal(head, weights["embed_tokens.weight"]):
        del weights["lm_head.weight"]
        return
    log.warning(
        "%s: config.json ties the head to the embedding table, but the checkpoint holds another lm_head.weight: "
        "the checkpoint's is used and takes %d bytes more",
        source.name,
        head.numel() * head.element_size(),
    )
