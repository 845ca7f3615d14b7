"""Where the ranks of a model exchange what they have computed: applied from outside to a finished model.

Twice a layer the ranks' sums are added up, and the logits of each rank's tokens are put side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from anycore.contract.ops import Ops
from anycore.models.layers import Embedding, Head, Linear
from anycore.models.parallel import first_token
from anycore.models.spec import ModelSpec

if TYPE_CHECKING:
    from anycore.models.decoder import Decoder
    from anycore.models.encoder import Encoder


class SplitLinear(Linear):
    """A matrix of which each rank holds some columns: products are summed over ranks, and then biased."""

    def __init__(self, linear: Linear) -> None:
        self.ops, self.handle, self.bias = linear.ops, linear.handle, None
        self.last = linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        out = self.ops.all_reduce(super().__call__(x))
        return out if self.last is None else out + self.last

    def before_norm(self, x: Tensor) -> Tensor:
        return self(x)


class SplitEmbedding(Embedding):
    """A table of which each rank holds the rows from `first` on, `count` of them; the others give zeros."""

    def __init__(self, ops: Ops, table: Any, first: int, count: int) -> None:
        super().__init__(ops, table)
        self.first, self.count = first, count

    def __call__(self, ids: Tensor, others: Sequence[tuple[Tensor | None, Any]] = (), scale: float = 1.0) -> Tensor:
        here = ids - self.first
        elsewhere = (here < 0) | (here >= self.count)
        rows = self.ops.embedding(here.masked_fill(elsewhere, 0), self.table)
        total = self.ops.all_reduce(rows.masked_fill(elsewhere[:, None], 0))
        for part in others:
            total = total + self.ops.embedding_sum([part])
        return total if scale == 1.0 else total * scale


class SplitHead(Head):
    """A head of which each rank holds the rows of its tokens, the last one perhaps fewer than `most`."""

    def __init__(self, head: Head, vocab: int, most: int) -> None:
        super().__init__(head.ops, head.handle)
        self.vocab, self.most = vocab, most

    def __call__(self, rows: Tensor) -> Tensor:
        logits = super().__call__(rows)
        if logits.shape[1] < self.most:
            logits = F.pad(logits, (0, self.most - logits.shape[1]))
        return self.ops.all_gather(logits)[:, : self.vocab].contiguous()


def embedding_of(spec: ModelSpec) -> Callable[[Ops, Any], Embedding]:
    """How a model looks up rows by token id."""
    if spec.shard is None:
        return Embedding
    return partial(SplitEmbedding, first=first_token(spec), count=spec.vocab_rows)


def split(model: Decoder | Encoder) -> None:
    """Let a model, built of this rank's part of the weights, exchange with the other ranks."""
    spec = model.spec
    if spec.shard is None:
        return
    for layer in model.layers:
        layer.out, layer.down = SplitLinear(layer.out), SplitLinear(layer.down)
    head = getattr(model, "head", None)
    if head is not None:
        most = -(-spec.vocab_size // spec.shard.ranks)
        model.head = SplitHead(head, spec.vocab_size, most)  # type: ignore[union-attr]
