"""The matrices of a layer, each with what it is multiplied by over a text, and with what makes that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anycore.contract.ops import Ops
from anycore.contract.weights import Weight
from anycore.models.decoder import Decoder
from anycore.models.encoder import Encoder
from anycore.models.spec import ModelSpec

ROWS = 192
"""Hidden rows of each matrix that a search compares products of; the mean is taken over all."""
LARGE = 4.0
"""Times the median size of the rows: what a larger one, such as the first token's, counts as."""

Parts = tuple[tuple[str, int], ...]
"""Checkpoint tensors and their rows, of which a matrix is made."""


class Inputs:
    """What a matrix is multiplied by, over a text: sums over all rows, and a few of the rows themselves."""

    def __init__(self, width: int, every: int) -> None:
        self.every = every
        self.count = 0
        self.sizes = torch.zeros(width)
        self.largest = torch.zeros(width)
        self.products = torch.zeros(width, width)
        self.some: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        size = rows.norm(dim=-1, keepdim=True)
        rows = rows * (LARGE * size.median() / size.clamp(min=1e-12)).clamp(max=1.0)
        self.some.append(rows[self.count % self.every :: self.every].clone())
        self.count += len(rows)
        self.sizes += rows.abs().sum(0)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.products.addmm_(rows.T, rows)

    def squares(self, columns: Tensor | None = None) -> Tensor:
        """[in, in]: the mean products of inputs with one another; of those divided by `columns`, if given."""
        mean = self.products / self.count
        return mean if columns is None else mean / columns[:, None] / columns


@dataclass(slots=True)
class Held:
    """A matrix in float32, and what is to be done when it is multiplied by."""

    weight: Tensor
    rounds: int = 0  # its inputs to int8, as many of a row as this by the largest of them; 0: not at all
    inputs: Inputs | None = None  # which take note of what it is multiplied by


class Observer(Ops):
    """The contract's operations, which take note of what matrices are multiplied by, and round it if that is meant."""

    def pack(self, weight: Weight) -> Any:
        return Held(weight.dense())

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if handle.inputs is not None:
            handle.inputs.add(x)
        return super().linear(eight_bits(x, handle.rounds) if handle.rounds else x, handle.weight, bias)


def eight_bits(rows: Tensor, group: int) -> Tensor:
    """Rows as w8a8 multiplies them: whole numbers up to 127 times a scale for each group of a row."""
    grouped = rows.reshape(*rows.shape[:-1], -1, group)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((grouped / scale).round_() * scale).view(rows.shape)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [out, in] of a layer, and the rows of what makes its inputs: those may be scaled, if it is, too."""

    parts: Parts
    held: Held
    makers: tuple[tuple[str, Tensor], ...] = field(default=())  # a norm, or a matrix's rows and their bias; by name
    repeats: int = 1  # heads that share the rows of a maker
    head_dim: int = 1

    def columns(self, scale: Tensor) -> Tensor:
        """A maker's rows as the columns that they become."""
        if self.repeats == 1:
            return scale
        return scale.view(-1, 1, self.head_dim).expand(-1, self.repeats, -1).flatten()

    def rows(self, column: Tensor) -> Tensor:
        """The mean of each maker's row over the columns that it becomes."""
        if self.repeats == 1:
            return column
        return column.view(-1, self.repeats, self.head_dim).mean(1).flatten()


def products(model: Decoder | Encoder, spec: ModelSpec, index: int) -> Iterator[Product]:
    """The four matrices of a layer: one whose rows make the inputs of another comes after it."""
    return of_decoder(model, spec, index) if isinstance(model, Decoder) else of_encoder(model, spec, index)


def of_decoder(model: Decoder, spec: ModelSpec, index: int) -> Iterator[Product]:
    layer, name = model.layers[index], f"layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
    qkv, gate_up = layer.qkv.linear, layer.gate_up.linear
    values = made_by(f"{attention}.v_proj", qkv.handle.weight[queries + keys :], qkv.bias, queries + keys)
    repeats = spec.heads // spec.kv_heads
    yield Product(((f"{attention}.o_proj.weight", spec.hidden_size),), layer.out.handle, values, repeats, spec.head_dim)
    up = made_by(f"{mlp}.up_proj", gate_up.handle.weight[inner:], gate_up.bias, inner)
    yield Product(((f"{mlp}.down_proj.weight", spec.hidden_size),), layer.down.handle, up)
    parts = tuple(
        (f"{attention}.{part}_proj.weight", rows) for part, rows in (("q", queries), ("k", keys), ("v", keys))
    )
    yield Product(parts, qkv.handle, ((f"{name}.input_layernorm.weight", layer.qkv.norm.weight),))
    before_mlp = "pre_feedforward_layernorm" if spec.norm_after else "post_attention_layernorm"
    parts = tuple((f"{mlp}.{part}_proj.weight", inner) for part in ("gate", "up"))
    yield Product(parts, gate_up.handle, ((f"{name}.{before_mlp}.weight", layer.gate_up.norm.weight),))


def of_encoder(model: Encoder, spec: ModelSpec, index: int) -> Iterator[Product]:
    """Norms feed the residual stream, too, and an activation follows the first matrix of the MLP: only what the values
    are multiplied by can be scaled.
    """
    layer, name = model.layers[index], f"encoder.layer.{index}"
    attention, heads = f"{name}.attention.self", spec.heads * spec.head_dim
    values = made_by(f"{attention}.value", layer.qkv.handle.weight[2 * heads :], layer.qkv.bias, 2 * heads)
    yield Product(((f"{name}.attention.output.dense.weight", spec.hidden_size),), layer.out.handle, values)
    yield Product(((f"{name}.output.dense.weight", spec.hidden_size),), layer.down.handle)
    parts = tuple((f"{attention}.{part}.weight", heads) for part in ("query", "key", "value"))
    yield Product(parts, layer.qkv.handle)
    yield Product(((f"{name}.intermediate.dense.weight", spec.intermediate_size),), layer.up.handle)


def made_by(name: str, rows: Tensor, bias: Tensor | None, first: int) -> tuple[tuple[str, Tensor], ...]:
    """The last rows of a fused matrix, and of its bias from `first` on."""
    weight = ((f"{name}.weight", rows),)
    return weight if bias is None else (*weight, (f"{name}.bias", bias[first:]))
