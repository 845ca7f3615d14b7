"""BERT, RoBERTa and XLM-R as one class: they differ in where positions start and in how their heads are called."""

from __future__ import annotations

from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.models.layers import Attention, Dense, LayerNorm, Linear, Weights, project
from anycore.models.spec import ModelSpec


class Layer:
    """Attention and an MLP, each added to its input and normed afterwards."""

    def __init__(self, ops: Ops, weights: Weights, spec: ModelSpec, index: int) -> None:
        name = f"encoder.layer.{index}"
        self.ops = ops
        self.kind = spec.activation
        attention = f"{name}.attention"
        self.attention = Attention(ops, weights, spec, index, f"{attention}.self.qkv", f"{attention}.output.dense")
        self.attention_norm = LayerNorm(ops, weights, f"{attention}.output.LayerNorm", spec)
        self.up = Linear(ops, weights, f"{name}.intermediate.dense")
        self.down = Linear(ops, weights, f"{name}.output.dense")
        self.norm = LayerNorm(ops, weights, f"{name}.output.LayerNorm", spec)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, H] → [T, H]."""
        x, _ = self.attention_norm(self.attention(x, batch), x)
        return self.norm(self.down(self.ops.activation(self.up(x), self.kind)), x)[0]


class Encoder:
    """A bidirectional encoder, with a scoring head where the spec has one."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops, dense: list[Dense]) -> None:
        self.spec = spec
        self.ops = ops
        self.dense = dense
        self.words: Tensor = weights["embeddings.word_embeddings.weight"]
        self.positions: Tensor = weights["embeddings.position_embeddings.weight"][spec.position_offset :]
        self.types: Tensor = weights["embeddings.token_type_embeddings.weight"]
        self.norm = LayerNorm(ops, weights, "embeddings.LayerNorm", spec)
        self.layers = [Layer(ops, weights, spec, index) for index in range(spec.layers)]
        self.scorer: tuple[Linear, Linear] | None = None
        if spec.head == "classifier":
            self.scorer = Linear(ops, weights, "classifier.dense"), Linear(ops, weights, "classifier.out")

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [T, H] of the last layer."""
        ops = self.ops
        types = self.types[0] if batch.token_types is None else ops.embedding(batch.token_types, self.types)
        x = ops.embedding(batch.input_ids, self.words) + types + ops.embedding(batch.positions, self.positions)
        x, _ = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch)
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
