"""The parameters of a model as one table: what it holds, and of which checkpoint tensors each is made.

`spec.weight_bytes` counts it and `loader` fills it, so the memory plan and the loaded model cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anycore.models.spec import DenseSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: the checkpoint tensors `parts` (name, rows), stacked along the first dimension."""

    name: str  # ends with ".weight" or ".bias"
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    packed: bool = False  # a matrix that `ops.linear` multiplies by
    exact: bool = False  # stays in float32 whatever the model's dtype
    optional: bool = False  # a tied head: taken from the file only if it differs from the embedding table
    table: bool = False  # rows are looked up in it by token id
    head: bool = False  # the language-model head

    @property
    def size(self) -> int:
        return prod(self.shape)


PREFIXES = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.|bert\.|roberta\.|xlm_roberta\.)"
)
RENAMED = ((".gamma", ".weight"), (".beta", ".bias"))
"""Endings that BERT's first checkpoints use for their norms."""


def canonical(name: str) -> str:
    """A checkpoint's name as `parameters` spells it."""
    name = PREFIXES.sub("", name)
    for old, new in RENAMED:
        if name.endswith(old):
            return name[: -len(old)] + new
    return name


def parameters(spec: ModelSpec) -> list[Parameter]:
    """Every parameter of the model, with names of the checkpoint but for prefixes and fused matrices."""
    return list(decoder(spec) if spec.family == "decoder" else encoder(spec))


def counted(spec: ModelSpec) -> list[Parameter]:
    """Every parameter that takes memory of its own: dense modules included, a tied head not."""
    modules = chain.from_iterable(wanted for _, wanted in dense(spec))
    return [p for p in (*parameters(spec), *modules) if not p.optional]


def decoder(spec: ModelSpec) -> Iterator[Parameter]:
    hidden, queries, keys = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield plain("embed_tokens.weight", spec.vocab_rows, hidden, table=True)
    for i in range(spec.layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        gate_up = {f"{mlp}.gate_proj": spec.intermediate_size, f"{mlp}.up_proj": spec.intermediate_size}
        yield norm(f"layers.{i}.input_layernorm.weight", hidden)
        yield from linear(f"{attention}.qkv_proj", qkv, hidden, spec.qkv_bias)
        if spec.qk_norm:
            yield norm(f"{attention}.q_norm.weight", spec.head_dim)
            yield norm(f"{attention}.k_norm.weight", spec.head_dim)
        yield from linear(f"{attention}.o_proj", {f"{attention}.o_proj": hidden}, queries, spec.output_bias)
        yield norm(f"layers.{i}.post_attention_layernorm.weight", hidden)
        if spec.norm_after:
            yield norm(f"layers.{i}.pre_feedforward_layernorm.weight", hidden)
            yield norm(f"layers.{i}.post_feedforward_layernorm.weight", hidden)
        yield from linear(f"{mlp}.gate_up_proj", gate_up, hidden, spec.mlp_bias)
        yield from linear(f"{mlp}.down_proj", {f"{mlp}.down_proj": hidden}, spec.intermediate_size, spec.mlp_bias)
    yield norm("norm.weight", hidden)
    if spec.head == "lm":
        # Not packed: a reranker takes two of its rows, and a tied head is the embedding table.
        parts = (("lm_head.weight", spec.vocab_rows),)
        yield Parameter("lm_head.weight", (spec.vocab_rows, hidden), parts, optional=spec.tied, head=True)
    elif spec.head == "classifier":
        yield from linear("score", {"score": labels(spec)}, hidden, bias=False)


def encoder(spec: ModelSpec) -> Iterator[Parameter]:
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.heads * spec.head_dim
    yield plain("embeddings.word_embeddings.weight", spec.vocab_rows, hidden, table=True)
    yield plain("embeddings.position_embeddings.weight", spec.max_positions + spec.position_offset, hidden)
    yield plain("embeddings.token_type_embeddings.weight", spec.token_type_count, hidden)
    yield from layer_norm("embeddings.LayerNorm", hidden)
    for i in range(spec.layers):
        layer = f"encoder.layer.{i}"
        attention = f"{layer}.attention.self"
        qkv = {f"{attention}.query": heads, f"{attention}.key": heads, f"{attention}.value": heads}
        yield from linear(f"{attention}.qkv", qkv, hidden)
        for name, width in (("attention.output.dense", heads), ("output.dense", inner)):
            yield from linear(f"{layer}.{name}", {f"{layer}.{name}": hidden}, width)
        yield from linear(f"{layer}.intermediate.dense", {f"{layer}.intermediate.dense": inner}, hidden)
        yield from layer_norm(f"{layer}.attention.output.LayerNorm", hidden)
        yield from layer_norm(f"{layer}.output.LayerNorm", hidden)
    if spec.head == "classifier":
        # BERT scores what its pooler makes of the first token, RoBERTa has the same two layers under other names.
        bert = spec.architecture.startswith("Bert")
        dense, out = ("pooler.dense", "classifier") if bert else ("classifier.dense", "classifier.out_proj")
        yield from linear("classifier.dense", {dense: hidden}, hidden)
        yield from linear("classifier.out", {out: labels(spec)}, hidden)


def labels(spec: ModelSpec) -> int:
    return spec.score.labels if spec.score else 1


def dense(spec: ModelSpec) -> list[tuple[DenseSpec, list[Parameter]]]:
    """Each sentence-transformers Dense module, which has a file of its own, and its parameters."""
    modules = spec.pooling.dense if spec.pooling else ()
    return [(m, list(linear("linear", {"linear": m.outputs}, m.inputs, m.bias, exact=True))) for m in modules]


def plain(name: str, *shape: int, table: bool = False) -> Parameter:
    return Parameter(name, shape, ((name, shape[0]),), table=table)


def norm(name: str, width: int) -> Parameter:
    return Parameter(name, (width,), ((name, width),), exact=True)


def layer_norm(name: str, width: int) -> Iterator[Parameter]:
    yield norm(f"{name}.weight", width)
    yield norm(f"{name}.bias", width)


def linear(
    name: str, parts: dict[str, int], inputs: int, bias: bool = True, exact: bool = False
) -> Iterator[Parameter]:
    """A matrix [rows, inputs], and its bias, whose rows come from several checkpoint matrices."""
    rows = sum(parts.values())
    weights = tuple((f"{part}.weight", size) for part, size in parts.items())
    yield Parameter(f"{name}.weight", (rows, inputs), weights, packed=True, exact=exact)
    if bias:
        yield Parameter(f"{name}.bias", (rows,), tuple((f"{p}.bias", size) for p, size in parts.items()), exact=exact)
