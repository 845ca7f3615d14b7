"""What a text tells about rounding a model, layer by layer: by which inputs of a matrix matter, and which go together.

Each layer is given what the layers before it make of the text as they are rounded already. What its matrices are
multiplied by is noted, scales between them are searched for (`scaling`), they are rounded so that what one weight
loses others make up for (`compensation`), and the layer is run again as it is now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from anycore.contract.backend import Backend, Memory
from anycore.contract.batch import Batch
from anycore.contract.formats import Format
from anycore.contract.weights import Int8Weight, QuantisedWeight
from anycore.errors import ConfigError
from anycore.models.convert.compensation import WholeNumbers, compensated, cut
from anycore.models.convert.products import ROWS, Inputs, Observer, Parts, Product, products
from anycore.models.convert.scaling import fold, search
from anycore.models.convert.tuning import Tuned, tune
from anycore.models.decoder import Decoder
from anycore.models.encoder import Encoder
from anycore.models.loader import load
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec

LEAST = 512
"""Tokens of a text that tells anything."""


@dataclass(slots=True)
class Calibration:
    """What to do to tensors, by their names in the table of parameters."""

    columns: dict[str, Tensor] = field(default_factory=dict)  # multiply the columns of a matrix
    rows: dict[str, Tensor] = field(default_factory=dict)  # divide the rows of a matrix or bias, or a norm's weights
    weights: dict[str, QuantisedWeight] = field(default_factory=dict)  # what matrices became
    norm_offset: bool = False  # norms store their weights less one

    def scaled(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the checkpoint as the scaled model has it, in float32 if it is changed."""
        if name in self.columns:
            tensor = tensor.float() * self.columns[name]
        if name not in self.rows:
            return tensor
        by = self.rows[name]
        if tensor.dim() == 2:
            return tensor.float() / by[:, None]
        offset = 1.0 if self.norm_offset and "norm" in name else 0.0
        return (tensor.float() + offset) / by - offset


class HostMemory(Memory):
    """Calibration keeps no cache and plans nothing."""

    def total(self) -> int:
        return 0

    def free(self) -> int:
        return 0


class Walk:
    """A text's hidden states, sequence by sequence, on their way through the layers."""

    def __init__(self, model: Decoder | Encoder, spec: ModelSpec, sequences: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.batches = [batch_of(spec, ids) for ids in sequences]
        self.states = [self.begin(batch) for batch in self.batches]

    def begin(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What the first layer is given: hidden states, and a decoder's residual stream."""
        model = self.model
        if isinstance(model, Decoder):
            return model.words(batch.input_ids, scale=model.embedding_scale), None
        others = [(batch.token_types, model.types), (batch.positions, model.positions)]
        return model.norm(model.words(batch.input_ids, others))[0], None

    def layer(self, index: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """What a layer makes of each sequence."""
        model = self.model
        for batch, (x, residual) in zip(self.batches, self.states, strict=True):
            if isinstance(model, Encoder):
                yield model.layers[index](x, batch, last=False), None
                continue
            layer = model.layers[index]
            rotary = model.rotary if layer.attention.window is None else model.rotary_local
            yield layer(x, residual, batch, rotary(batch.positions), last=False)

    def observe(self, index: int, every: int, found: Sequence[Product]) -> list[Inputs]:
        """What each product of a layer is multiplied by."""
        for product in found:
            product.held.inputs = Inputs(product.held.weight.shape[1], every)
        for _ in self.layer(index):
            pass
        noted = [product.held.inputs for product in found]
        for product in found:
            product.held.inputs = None
        return [inputs for inputs in noted if inputs is not None]

    def go_on(self, index: int) -> None:
        """Put what a layer makes in place of what it was given."""
        for number, state in enumerate(self.layer(index)):
            self.states[number] = state


def batch_of(spec: ModelSpec, ids: Sequence[int]) -> Batch:
    return Batch(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        query_lens=[len(ids)],
        context_lens=[0],
        output_rows=None,
        causal=spec.attention == "causal",
        token_types=torch.zeros(len(ids), dtype=torch.int64) if spec.token_type_count else None,
    )


@torch.no_grad()
def calibrate(
    source: Source,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    formats: Mapping[str, Format],
    progress: Progress | None = None,
) -> Calibration:
    """Round every matrix of the layers that is in `formats`, by the hidden states of a text.

    Then scales are tuned, if the model is one of language and some have 4 bits: see `tuning`.

    Raises:
        ConfigError: the text is too short.
    """
    count = sum(map(len, sequences))
    if count < LEAST:
        raise ConfigError(f"--calibration: the text has {count} tokens, {LEAST} are needed", param="calibration")
    cpu = torch.device("cpu")
    model = load(source, spec, Backend(cpu, HostMemory(cpu), Observer()), "float32")
    assert isinstance(model, (Decoder, Encoder))
    batches = [batch_of(spec, ids) for ids in sequences if 2 * len(ids) > max(map(len, sequences))]
    tunes = spec.head == "lm" and any(wanted.kind == "int4" for wanted in formats.values())
    exact = [model.forward(batch) for batch in batches] if tunes else []
    walk = Walk(model, spec, sequences)
    count = sum(len(batch.input_ids) for batch in walk.batches)
    tuned: list[Tuned] = []
    result = Calibration(norm_offset=spec.norm_offset)
    for index in range(spec.layers):
        every = [p for p in products(model, spec, index) if all(name in formats for name, _ in p.parts)]
        observed = walk.observe(index, max(1, count // ROWS), every)
        scales = [scale(product, inputs, formats, result) for product, inputs in zip(every, observed, strict=True)]
        for product, inputs, columns in zip(every, observed, scales, strict=True):
            found = rounded(product, inputs.squares(columns), formats)
            for weight, parts in found:
                result.weights |= cut(weight, parts)
            held, last = product.held, found[-1][0]
            held.weight.copy_(torch.cat([weight.dense() for weight, _ in found]))
            if tunes:
                tuned.append(Tuned(held, found))
            elif isinstance(last, Int8Weight):
                held.rounds = last.group
        walk.go_on(index)
        if progress is not None:
            progress("calibration", (index + 1) / spec.layers)
    head = "embed_tokens.weight" if spec.tied else "lm_head.weight"
    if not isinstance(model, Decoder) or model.head is None or not tunes:
        return result
    dense = model.head.handle.weight
    if head in formats and formats[head].kind == "int4":
        whole = table(model, walk, spec.tied, formats[head])
        tuned.append(Tuned(model.head.handle, [(whole, ((head, len(dense)),))]))
    if spec.tied:
        model.words.table = model.head.handle.weight
    tune(model, tuned, dense, batches, exact, progress)
    for one in tuned:
        for weight, parts in one.found():
            result.weights |= cut(weight, parts)
    return result


def rounded(product: Product, squares: Tensor, formats: Mapping[str, Format]) -> list[tuple[WholeNumbers, Parts]]:
    """The rows of a matrix, those in a row that have one format at a time, and what they are part of."""
    found: list[tuple[WholeNumbers, Parts]] = []
    first = 0
    for wanted, run in groupby(product.parts, lambda part: formats[part[0]]):
        parts = tuple(run)
        rows = sum(count for _, count in parts)
        found.append((compensated(product.held.weight[first : first + rows], squares, wanted), parts))
        first += rows
    return found


def table(model: Decoder, walk: Walk, tied: bool, wanted: Format) -> WholeNumbers:
    """Round the head by what the last norm gives it; if it is the embedding table, too, by as much for its own sake."""
    assert model.head is not None
    inputs = Inputs(model.head.handle.weight.shape[1], every=1 << 30)
    for x, residual in walk.states:
        inputs.add(model.norm(x, residual)[0])
    squares = inputs.squares()
    if tied:
        squares = squares + squares.diagonal().median() * torch.eye(len(squares))
    return compensated(model.head.handle.weight, squares, wanted)


def scale(product: Product, inputs: Inputs, formats: Mapping[str, Format], result: Calibration) -> Tensor | None:
    """Search a matrix's scales, apply them and note them; return what its columns were multiplied by."""
    best = search(product, inputs, formats[product.parts[0][0]])
    if best is None:
        return None
    fold(product, best)
    columns = product.columns(best)
    result.columns |= {name: columns for name, _ in product.parts}
    result.rows |= {name: best for name, _ in product.makers}
    return columns
