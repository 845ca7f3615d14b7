"""BERT, RoBERTa and XLM-R as one class: they differ in where positions start and in how their heads are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.models.layers import Attention, Dense, Embedding, LayerNorm, Linear, Weights, packed_table, project
from anycore.models.spec import ModelSpec


class Layer:
    """Attention and an MLP, each added to its input and normed afterwards."""

    def __init__(self, ops: Ops, weights: Weights, spec: ModelSpec, index: int) -> None:
        name = f"encoder.layer.{index}"
        self.ops = ops
        self.kind = spec.activation
        self.qkv = Linear(ops, weights, f"{name}.attention.self.qkv")
        self.attention = Attention(ops, weights, spec, index, f"{name}.attention.self")
        self.out = Linear(ops, weights, f"{name}.attention.output.dense")
        self.attention_norm = LayerNorm(ops, weights, f"{name}.attention.output.LayerNorm", spec)
        self.up = Linear(ops, weights, f"{name}.intermediate.dense")
        self.down = Linear(ops, weights, f"{name}.output.dense")
        self.norm = LayerNorm(ops, weights, f"{name}.output.LayerNorm", spec)

    def __call__(self, x: Tensor, batch: Batch, last: bool) -> Tensor:
        """[T, H] → [T, H]; after the last layer's attention only the wanted rows go on."""
        attended = self.attention(self.qkv(x), batch)
        if last:
            x, attended = self.ops.wanted(x, batch), self.ops.wanted(attended, batch)
        x = self.attention_norm(self.out(attended), x)[0]
        return self.norm(self.down(self.ops.activation(self.up(x), self.kind)), x)[0]


class Encoder:
    """A bidirectional encoder, with a scoring head where the spec has one."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        dense: list[Dense],
        embedding: Callable[[Ops, Any], Embedding] = Embedding,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.dense = dense
        self.words = embedding(ops, packed_table(weights["embeddings.word_embeddings.weight"], ops))
        self.positions: Tensor = weights["embeddings.position_embeddings.weight"][spec.position_offset :]
        self.types: Tensor = weights["embeddings.token_type_embeddings.weight"]
        self.norm = LayerNorm(ops, weights, "embeddings.LayerNorm", spec)
        self.layers = [Layer(ops, weights, spec, index) for index in range(spec.layers)]
        self.scorer: tuple[Linear, Linear] | None = None
        if spec.head == "classifier":
            self.scorer = Linear(ops, weights, "classifier.dense"), Linear(ops, weights, "classifier.out")

    def forward(self, batch: Batch) -> Tensor:
        """Return the last layer's hidden states [R, H] of `batch.output_rows`."""
        others = [(batch.token_types, self.types), (batch.positions, self.positions)]
        x = self.norm(self.words(batch.input_ids, others))[0]
        for layer in self.layers:
            x = layer(x, batch, last=layer is self.layers[-1])
        return x

    def logits(self, rows: Tensor) -> Tensor:
        """Encoders generate nothing."""
        raise NotImplementedError(f"{self.spec.architecture} has no language-model head")

    def score(self, rows: Tensor) -> Tensor:
        """[R, H] of first tokens → [R, labels] float32."""
        assert self.scorer is not None, "this model has no head that scores"
        dense, out = self.scorer
        return out(dense(rows).tanh()).float()

    def project(self, vectors: Tensor) -> Tensor:
        """[B, H] float32 → [B, D]."""
        return project(vectors, self.dense)
