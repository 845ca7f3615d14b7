"""From a located model to a running one: every parameter loaded or tied, nothing damaged, nothing left as it was."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend
from anycore.contract.declare import DTYPES
from anycore.contract.weights import DenseWeight, QuantisedWeight
from anycore.errors import WeightsError
from anycore.models.checkpoint import Checkpoint, open_checkpoint
from anycore.models.cutting import narrow
from anycore.models.decoder import Decoder
from anycore.models.encoder import Encoder
from anycore.models.gathering import Gathered, Place, copied, tensors
from anycore.models.layers import Dense, Pieces
from anycore.models.parallel import Cut, cuts
from anycore.models.parameters import Parameter, canonical, dense, parameters
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import Quantization, Stored, pieces, words
from anycore.models.shards import Safetensors
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec
from anycore.models.split import embedding_of, split
from anycore.models.whole import WholeModel, forward_of

log = logging.getLogger(__name__)

Model = Decoder | Encoder | WholeModel
Key = tuple[str, int]
"""A piece by the name of its parameter and its first row there."""
Made = tuple[Any, Tensor | None, int]
"""What is on the device of it, the order of its columns if that is another one, and how many rows it has."""

AHEAD = 1 << 30
"""Bytes that readers may be ahead of the device: the host's memory never holds a whole model."""
NOTHING: Mapping[str, Cut] = MappingProxyType({})
NAMED = 8
"""How many tensors a message names before it only counts them."""

UNUSED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$|^(pooler|cls|lm_head)\.")
"""Tensors that a checkpoint may well hold though nothing here reads them: buffers, and heads of other uses."""


def load(
    source: Source,
    spec: ModelSpec,
    backend: Backend,
    dtype: str,
    progress: Progress | None = None,
    quantization: Quantization | None = None,
) -> Model:
    """Load a model onto the backend's device, its weights in `dtype` or in the formats of `quantization`.

    Raises:
        WeightsError: files are damaged or incomplete; raised before any weight is read.
    """
    whole = forward_of(backend, source, spec, dtype, progress)
    if whole is not None:
        return WholeModel(spec, whole, dense_modules(source, spec, backend))
    checkpoint = open_checkpoint(source, whole=spec.shard is None)
    cut = narrow(checkpoint, cuts(spec))
    weights = fill(
        parameters(spec), checkpoint, spec.architecture, backend, dtype, progress, spec.stored, quantization, cut
    )
    if spec.head == "lm" and spec.tied:
        tie(weights, source)
    build = Decoder if spec.family == "decoder" else Encoder
    model = build(spec, weights, backend.ops, dense_modules(source, spec, backend), embedding_of(spec))
    split(model)
    return model


def dense_modules(source: Source, spec: ModelSpec, backend: Backend) -> list[Dense]:
    """The modules of sentence-transformers that follow pooling."""
    modules: list[Dense] = []
    for module, wanted in dense(spec):
        checkpoint = Safetensors(source.folder / module.folder)
        part = fill(wanted, checkpoint, module.folder, backend, "float32", None)
        modules.append(Dense(backend.ops, part, module))
    return modules


def check(source: Source, spec: ModelSpec) -> None:
    """Check the weight files as `load` does, from their headers alone.

    Raises:
        WeightsError: see `load`.
    """
    checkpoint = open_checkpoint(source)
    match(parameters(spec), checkpoint, spec.architecture, spec.stored)
    for module, wanted in dense(spec):
        match(wanted, Safetensors(source.folder / module.folder), module.folder)


def match(
    wanted: list[Parameter],
    checkpoint: Checkpoint,
    what: str,
    stored: Stored | None = None,
    quantization: Quantization | None = None,
    cut: Mapping[str, Cut] = NOTHING,
) -> dict[str, Place]:
    """Return the place of each checkpoint tensor that is wanted, all of it or the part that `cut` names.

    Raises:
        WeightsError: a tensor is missing, there twice, or of another shape or format than config.json makes it.
    """
    every = [piece for parameter in wanted for piece in pieces(parameter, quantization)]
    shapes = {name: (rows, *p.shape[1:]) for p in wanted for name, rows in p.parts}
    shapes |= {name: part.whole for name, part in cut.items()}
    formats = dict(stored.formats) if stored is not None else {}
    found: dict[str, str] = {}
    for name, shape in checkpoint.shapes.items():
        plain = canonical(name)
        if plain not in shapes:
            continue
        where = f"{checkpoint.file_of(name)}: {name}"
        if plain in found:
            raise WeightsError(f"{where} and {found[plain]} are the same tensor twice")
        found[plain] = name
        if tuple(shape) != shapes[plain]:
            raise WeightsError(
                f"{where} has shape {list(shape)}, but config.json makes it {list(shapes[plain])}: "
                "the two do not belong together"
            )
        if checkpoint.formats.get(name) != formats.get(plain):
            raise WeightsError(
                f"{where} is {words(checkpoint.formats.get(name))}, but config.json makes it "
                f"{words(formats.get(plain))}: the two do not belong together"
            )
    optional = {name for p in wanted if p.optional for name, _ in p.parts}
    missing = [name for name in shapes if name not in found and name not in optional]
    if missing:
        raise WeightsError(missing_message(missing, len(shapes), checkpoint, what))
    places: dict[str, Place] = {}
    for piece in every:
        names = [found[name] for name, _ in piece.parts if name in found]
        kept = piece.format is not None and all(checkpoint.formats.get(name) == piece.format for name in names)
        first = 0
        for name, (part, rows) in zip(names, piece.parts, strict=False):  # an optional one may not be there
            places[name] = Place(piece, first, rows, kept, cut.get(part))
            first += rows
    return places


def missing_message(missing: list[str], count: int, checkpoint: Checkpoint, what: str) -> str:
    files = sorted({checkpoint.file_of(name) for name in checkpoint.shapes})
    text = f"{some(files)}: {len(missing)} of {count} tensors of {what} are missing: {some(missing)}"
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
    stored: Stored | None = None,
    quantization: Quantization | None = None,
    cut: Mapping[str, Cut] = NOTHING,
) -> dict[str, Any]:
    """Return finished parameters by name: cast, fused, on the device, and packed where `ops.linear` takes them.

    Tables that are quantised are left for the model to pack: a tied head is the same matrix.
    """
    places = match(wanted, checkpoint, what, stored, quantization, cut)
    extra = [name for name in checkpoint.shapes if name not in places and not UNUSED.search(canonical(name))]
    if extra:
        log.warning("%d tensors of the checkpoint are not used by %s: %s", len(extra), what, some(extra))
    total = sum(place.size for place in places.values())
    made: dict[Key, Made] = {}
    done = 0
    for place, whole in copied(places, checkpoint, dtype, ahead_of(places, checkpoint, dtype)):
        if whole is not None:
            made[place.key] = finish(place, whole, backend, what)
        del whole  # before the next one is begun
        done += place.size
        if progress is not None:
            progress("weights", done / total)
    keys = {place.key for place in places.values()}
    lacking = sorted(name for name, _ in keys - made.keys())
    if lacking:
        raise WeightsError(f"{what}: the checkpoint listed but did not give {some(lacking)}")
    return joined(made)


def ahead_of(places: dict[str, Place], checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes that readers may be ahead. Where weights are quantised on the way, a part of the largest file is enough:
    nobody should need more memory than they will take, and a file.
    """
    if all(place.kept or place.piece.format is None for place in places.values()):
        return AHEAD
    files = Counter[str]()
    for name in places:
        files[checkpoint.file_of(name)] += prod(checkpoint.shapes[name]) * DTYPES[dtype]
    return min(AHEAD, max(files.values()) // 64)


def finish(place: Place, whole: Gathered, backend: Backend, what: str) -> Made:
    """A piece on the device, the order of its columns where that is another one, and how many rows it has."""
    piece, upload = place.piece, backend.memory.upload
    weight = whole.host
    if isinstance(weight, Tensor):
        weight = upload(weight)
        whole.host = weight  # the host's copy is not needed any more
        if piece.format is not None:
            found = backend.ops.quantise(weight, piece.format)
            weight = found if found is not None else quantise(weight, piece.format)
            whole.host = weight
    else:
        sent: dict[str, Any] = {name: upload(part) for name, part in tensors(weight).items()}
        weight = replace(weight, **sent)
    order = None if whole.order is None else upload(whole.order)
    if piece.parameter.packed:
        return backend.ops.pack(DenseWeight(weight) if isinstance(weight, Tensor) else weight), order, piece.rows
    if order is not None:
        raise WeightsError(f"{what}: {piece.parameter.name} has its columns in another order, which no table may have")
    return weight, None, piece.rows


def joined(made: dict[Key, Made]) -> dict[str, Any]:
    """Parameters by name, of the one piece that most of them are, or of several."""
    together: dict[str, list[Made]] = {}
    for key in sorted(made):
        together.setdefault(key[0], []).append(made[key])
    plain = {name: parts[0][0] for name, parts in together.items() if len(parts) == 1 and parts[0][1] is None}
    return {name: plain[name] if name in plain else Pieces(tuple(parts)) for name, parts in together.items()}


def tie(weights: dict[str, Any], source: Source) -> None:
    """Drop a head that equals the embedding table it is tied to; keep one that differs, and say so."""
    head = weights.get("lm_head.weight")
    if head is None:
        return
    if same(head, weights["embed_tokens.weight"]):
        del weights["lm_head.weight"]
        return
    log.warning(
        "%s: config.json ties the head to the embedding table, but the checkpoint holds another lm_head.weight: "
        "the checkpoint's is used and takes %d bytes more",
        source.name,
        sum(part.nbytes for part in ([head] if isinstance(head, Tensor) else tensors(head).values())),
    )


def same(one: Tensor | QuantisedWeight, other: Tensor | QuantisedWeight) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    pairs = zip(tensors(one).values(), tensors(other).values(), strict=False)
    return type(one) is type(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
