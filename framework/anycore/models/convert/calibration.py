"""Activation-aware rounding to 4 bits: what a text's hidden states say of which inputs of a matrix matter.

After Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). The inputs of a matrix that are large are scaled
up in it and down in what makes them, a norm or another matrix, so that rounding hurts them less and the product is the
same; how much is searched for, layer by layer. Then each group may leave out its largest weights, where the others
gain more by the finer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend, Memory
from anycore.contract.batch import Batch
from anycore.contract.formats import Format
from anycore.contract.ops import Ops
from anycore.contract.weights import Int4Weight, spread
from anycore.errors import ConfigError
from anycore.models.decoder import Decoder
from anycore.models.loader import load
from anycore.models.quantised.rounding import quantise
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec

SEQUENCE = 512
"""Tokens that are run at a time."""
ROWS = 192
"""Hidden rows of each matrix that the search compares products of; the mean is taken over all."""
EXPONENTS = tuple(i / 20 for i in range(20))
KEPT = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried."""


@dataclass(slots=True)
class Calibration:
    """What to do to tensors, by their names in the table of parameters."""

    columns: dict[str, Tensor] = field(default_factory=dict)  # multiply the columns of a matrix
    rows: dict[str, Tensor] = field(default_factory=dict)  # divide the rows of a matrix or bias, or a norm's weights
    importance: dict[str, Tensor] = field(default_factory=dict)  # mean square of each input, after scaling
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

    def rounded(self, name: str, weight: Tensor, wanted: Format) -> Int4Weight:
        """Round a scaled matrix, each group over the share of its range that costs its product least."""
        importance = self.importance.get(name)
        return clipped(weight.float(), wanted, torch.ones(weight.shape[1]) if importance is None else importance)


class Inputs:
    """What a matrix is multiplied by, over a text: sums over all rows, and a few of the rows themselves."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.count = 0
        self.sizes = torch.zeros(())
        self.squares = torch.zeros(())
        self.some: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self.count += len(rows)
        self.sizes = self.sizes + rows.abs().sum(0)
        self.squares = self.squares + rows.pow(2).sum(0)
        self.some.append(rows[:: self.every].clone())


class Observer(Ops):
    """The contract's operations, which take note of what chosen matrices are multiplied by."""

    def __init__(self) -> None:
        self.seen: dict[int, Inputs] = {}  # by the id of a handle

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if id(handle) in self.seen:
            self.seen[id(handle)].add(x)
        return super().linear(x, handle, bias)


class HostMemory(Memory):
    """Calibration keeps no cache and plans nothing."""

    def total(self) -> int:
        return 0

    def free(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [out, in] of a layer with what it is multiplied by, and what makes that."""

    parts: tuple[tuple[str, int], ...]  # checkpoint tensors and their rows
    handle: Tensor
    makers: tuple[str, ...]  # the norm, or the weight and bias of the matrix, whose rows are this one's columns
    repeats: int = 1  # heads that share the rows of a maker
    head_dim: int = 1


@torch.inference_mode()
def calibrate(
    source: Source,
    spec: ModelSpec,
    ids: Sequence[int],
    formats: Mapping[str, Format],
    progress: Progress | None = None,
) -> Calibration:
    """Search the scales of every matrix in `formats`, by the hidden states of a text.

    Raises:
        ConfigError: the model has no layers that can be scaled, or the text is too short.
    """
    if spec.family != "decoder":
        raise ConfigError(
            "--calibration needs a decoder: an encoder's norms feed the residual stream, too, and cannot be scaled",
            param="calibration",
        )
    if len(ids) < SEQUENCE:
        raise ConfigError(f"--calibration: the text has {len(ids)} tokens, {SEQUENCE} are needed", param="calibration")
    observer, cpu = Observer(), torch.device("cpu")
    model = load(source, spec, Backend(cpu, HostMemory(cpu), observer), "float32")
    assert isinstance(model, Decoder)
    result = Calibration(norm_offset=spec.norm_offset)
    for layer in model.layers:
        handles = layer.qkv.linear.handle, layer.out.handle, layer.gate_up.linear.handle, layer.down.handle
        observer.seen |= {id(handle): Inputs(max(1, len(ids) // ROWS)) for handle in handles}
    run(model, ids, progress)
    for index in range(spec.layers):
        for product in products(model, spec, index):
            inputs = observer.seen.pop(id(product.handle))
            if all(name in formats for name, _ in product.parts):
                search(product, inputs, formats[product.parts[0][0]], result)
        if progress is not None:
            progress("calibration: scales", (index + 1) / spec.layers)
    return result


def run(model: Decoder, ids: Sequence[int], progress: Progress | None) -> None:
    """Compute the hidden states of the text, a sequence at a time."""
    starts = range(0, len(ids) - SEQUENCE + 1, SEQUENCE)
    for start in starts:
        batch = Batch(
            input_ids=torch.tensor(ids[start : start + SEQUENCE]),
            positions=torch.arange(SEQUENCE),
            query_lens=[SEQUENCE],
            context_lens=[0],
            output_rows=None,
            causal=True,
        )
        model.forward(batch)
        if progress is not None:
            progress("calibration: hidden states", (start + SEQUENCE) / (starts[-1] + SEQUENCE))


def products(model: Decoder, spec: ModelSpec, index: int) -> Iterator[Product]:
    """The four matrices of a layer, each with what its columns can be taken out of."""
    layer, name = model.layers[index], f"layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
    qkv = tuple((f"{attention}.{part}_proj.weight", rows) for part, rows in (("q", queries), ("k", keys), ("v", keys)))
    before_mlp = "pre_feedforward_layernorm" if spec.norm_after else "post_attention_layernorm"
    yield Product(qkv, layer.qkv.linear.handle, (f"{name}.input_layernorm.weight",))
    yield Product(
        ((f"{attention}.o_proj.weight", spec.hidden_size),),
        layer.out.handle,
        (f"{attention}.v_proj.weight", f"{attention}.v_proj.bias"),
        spec.heads // spec.kv_heads,
        spec.head_dim,
    )
    gate_up = tuple((f"{mlp}.{part}_proj.weight", inner) for part in ("gate", "up"))
    yield Product(gate_up, layer.gate_up.linear.handle, (f"{name}.{before_mlp}.weight",))
    down = ((f"{mlp}.down_proj.weight", spec.hidden_size),)
    yield Product(down, layer.down.handle, (f"{mlp}.up_proj.weight", f"{mlp}.up_proj.bias"))


def search(product: Product, inputs: Inputs, wanted: Format, result: Calibration) -> None:
    """Find the exponent whose scales change the product least, and note what it asks for."""
    size = inputs.sizes / inputs.count
    if product.repeats > 1:  # heads that share keys and values share scales
        size = size.view(-1, product.repeats, product.head_dim).mean(1).flatten()
    rows = torch.cat(inputs.some)
    weight = product.handle
    best, least = torch.ones_like(size), float("inf")
    for exponent in EXPONENTS:
        scale = size.clamp(min=1e-4) ** exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        columns = repeated(scale, product)
        rounded = quantise(weight * columns, wanted).dense() / columns
        loss = float((rows @ (rounded - weight).T).pow(2).mean())
        if loss < least:
            best, least = scale, loss
    columns = repeated(best, product)
    for name, _ in product.parts:
        result.columns[name] = columns
        result.importance[name] = inputs.squares / inputs.count / columns.pow(2)
    for name in product.makers:
        result.rows[name] = best


def repeated(scale: Tensor, product: Product) -> Tensor:
    """A maker's rows as the columns that they become."""
    if product.repeats == 1:
        return scale
    return scale.view(-1, 1, product.head_dim).expand(-1, product.repeats, -1).flatten()


def clipped(weight: Tensor, wanted: Format, importance: Tensor) -> Int4Weight:
    """Round each group over the share of its range at which the weighted squares of its errors are least."""
    group, columns = wanted.group, weight.shape[1]
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    best: Int4Weight | None = None
    least = torch.empty(0)
    for share in KEPT:
        tried = quantise(grouped.clamp(low * share, high * share).view_as(weight), wanted)
        assert isinstance(tried, Int4Weight)
        loss = ((tried.dense() - weight).pow(2) * importance).view_as(grouped).sum(-1)
        if best is None:
            best, least = tried, loss
            continue
        better = loss < least
        least = torch.where(better, loss, least)
        best = Int4Weight(
            torch.where(spread(better, group, columns), tried.data, best.data),
            torch.where(better, tried.scale, best.scale),
            torch.where(better, tried.zero, best.zero),
            group,
            weight.dtype,
        )
    assert best is not None
    return best
