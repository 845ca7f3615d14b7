"""Llama, Mistral, Qwen2, Qwen3 and Gemma 3 as one class: what differs are the flags of its ModelSpec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.contract.weights import DenseWeight, QuantisedWeight
from anycore.models.layers import (
    Attention,
    Dense,
    Embedding,
    Head,
    Linear,
    NormLinear,
    RMSNorm,
    Weights,
    packed_table,
    project,
)
from anycore.models.rotary import Rotary
from anycore.models.spec import ModelSpec

Angles = tuple[Tensor, Tensor]


class Layer:
    """Attention and a gated MLP, each between a norm and the residual stream; Gemma norms their results too."""

    def __init__(self, ops: Ops, weights: Weights, spec: ModelSpec, index: int) -> None:
        name = f"layers.{index}"
        self.ops = ops
        before_attention = RMSNorm(ops, weights, f"{name}.input_layernorm", spec)
        self.qkv = NormLinear(before_attention, Linear(ops, weights, f"{name}.self_attn.qkv_proj"))
        self.attention = Attention(ops, weights, spec, index, f"{name}.self_attn")
        self.out = Linear(ops, weights, f"{name}.self_attn.o_proj")
        self.after: tuple[RMSNorm, RMSNorm] | None = None
        before_mlp = after = RMSNorm(ops, weights, f"{name}.post_attention_layernorm", spec)
        if spec.norm_after:
            before_mlp = RMSNorm(ops, weights, f"{name}.pre_feedforward_layernorm", spec)
            self.after = after, RMSNorm(ops, weights, f"{name}.post_feedforward_layernorm", spec)
        self.gate_up = NormLinear(before_mlp, Linear(ops, weights, f"{name}.mlp.gate_up_proj"), spec.activation)
        self.down = Linear(ops, weights, f"{name}.mlp.down_proj")

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: Batch, angles: Angles, last: bool
    ) -> tuple[Tensor, Tensor]:
        """[T, H] and the residual stream it is to be added to → the same for the next layer.

        After the last layer's attention only the wanted rows go on: the others have left their keys and values.
        """
        x, residual = self.qkv(x, residual)
        x = self.attention(x, batch, angles)
        if last:
            x, residual = self.ops.wanted(x, batch), self.ops.wanted(residual, batch)
        x = self.out.before_norm(x)
        if self.after is not None:
            x, _ = self.after[0](x)
        x, residual = self.gate_up(x, residual)
        x = self.down.before_norm(x)
        if self.after is not None:
            x, _ = self.after[1](x)
        return x, residual


class Decoder:
    """A causal language model, an embedder made of one, or a reranker: the spec says which head there is."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Ops,
        dense: list[Dense],
        embedding: Callable[[Ops, Any], Embedding] = Embedding,
    ) -> None:
        assert spec.rope is not None
        device = weights["norm.weight"].device
        self.spec = spec
        self.ops = ops
        self.dense = dense
        table: Tensor | QuantisedWeight = weights["embed_tokens.weight"]
        self.table = packed_table(table, ops)
        self.words = embedding(ops, self.table)
        # As Hugging Face does, the scale is rounded to the dtype before it multiplies.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=table.dtype))
        self.layers = [Layer(ops, weights, spec, index) for index in range(spec.layers)]
        self.norm = RMSNorm(ops, weights, "norm", spec)
        self.rotary = Rotary(ops, spec.rope, spec.head_dim, device)
        self.rotary_local = Rotary(ops, spec.rope_local, spec.head_dim, device) if spec.rope_local else self.rotary
        self.head: Head | None = None
        self.scorer: Linear | None = None
        if spec.head == "classifier":
            self.scorer = Linear(ops, weights, "score")
        if spec.head == "lm":
            head: Tensor | QuantisedWeight = weights.get("lm_head.weight", table)
            if isinstance(head, Tensor):
                handle = ops.pack(DenseWeight(head))
            else:
                handle = self.table if head is table else ops.pack(head)
            self.head = Head(ops, handle)
            if spec.score is not None and spec.score.yes_no_ids is not None:
                no_yes = torch.tensor(spec.score.yes_no_ids[::-1], device=device)
                rows = embedding(ops, head if isinstance(head, Tensor) else handle)(no_yes)
                self.scorer = Linear(ops, {"rows.weight": ops.pack(DenseWeight(rows))}, "rows")

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [R, H] of `batch.output_rows`, after the final norm."""
        x = self.words(batch.input_ids, scale=self.embedding_scale)
        angles = self.rotary(batch.positions)
        local = angles if self.rotary_local is self.rotary else self.rotary_local(batch.positions)
        residual: Tensor | None = None
        for layer in self.layers:
            turned = local if layer.attention.window is not None else angles
            x, residual = layer(x, residual, batch, turned, last=layer is self.layers[-1])
        return self.norm(x, residual)[0]

    def logits(self, rows: Tensor) -> Tensor:
        """[R, H] → [R, V] float32."""
        assert self.head is not None, "this model was loaded without a language-model head"
        return self.capped(self.head(rows))

    def capped(self, logits: Tensor) -> Tensor:
        """What the head has made, within the cap of models that have one."""
        cap = self.spec.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def score(self, rows: Tensor) -> Tensor:
        """[R, H] of last tokens → [R, labels] float32; a yes/no reranker's are the logits of (no, yes)."""
        assert self.scorer is not None, "this model has no head that scores"
        return self.scorer(rows).float()

    def project(self, vectors: Tensor) -> Tensor:
        """[B, H] float32 → [B, D]."""
        return project(vectors, self.dense)
