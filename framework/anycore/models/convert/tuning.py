"""Scales of a decoder of 4 bits by which its answers come nearer to those of the dense one, found by gradient.

Layer by layer, a matrix is rounded such that its own products stay near. What that costs the tokens the model predicts
is told by its logits alone: how far they are from the dense model's is lowered step by step, by a sequence of the text
each. Whole numbers and zero points stay, and so does all that is dense: there are 32 times fewer scales than numbers,
too few to learn the text by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch
from anycore.models.convert.compensation import WholeNumbers
from anycore.models.convert.products import Held, Parts
from anycore.models.decoder import Decoder
from anycore.models.source import Progress

STEPS = 16
RATE = 1e-3
"""Of itself, by how much a scale changes in a step at most: at first, then less and less."""
WARM = 4
"""Steps in which it grows to that: the first gradients are of few tokens."""
MOMENTS = (0.9, 0.95)
"""What the means of gradients and of their squares keep of themselves in a step."""
LOGITS = 1 << 25
"""That are there at a time, of as many rows as have so many."""


class Tuned:
    """A matrix whose scales are tuned: `held.weight` is what it stands for. All its rows have groups of one size."""

    def __init__(self, held: Held, start: Sequence[tuple[WholeNumbers, Parts]]) -> None:
        self.held = held
        self.start = start
        self.group = start[0][0].group
        scale = torch.cat([weight.scale for weight, _ in start])
        self.changes = torch.zeros_like(scale)  # [out, groups]: of each scale, in shares of it
        self.changes.grad = torch.zeros_like(scale)
        held.weight = self.dense().requires_grad_()
        held.weight.register_post_accumulate_grad_hook(self.gather)  # type: ignore[no-untyped-call]

    def gather(self, weight: Tensor) -> None:
        """Add the matrix's gradient to that of the changes, and drop it: those of all at once would be a model more."""
        assert weight.grad is not None
        assert self.changes.grad is not None
        by_group = (weight.grad * weight.detach()).view(len(weight), -1, self.group)
        self.changes.grad += by_group.sum(-1)
        weight.grad = None

    def found(self) -> list[tuple[WholeNumbers, Parts]]:
        """As it is now. Scales have eight significant bits, as `rounding` gives them."""
        changes = torch.split(self.changes, [len(weight.scale) for weight, _ in self.start])
        return [
            (replace(weight, scale=(weight.scale * (1 + change)).bfloat16().float()), parts)
            for (weight, parts), change in zip(self.start, changes, strict=True)
        ]

    def dense(self) -> Tensor:
        parts = [weight.dense() for weight, _ in self.found()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # a table is large


def tune(
    model: Decoder,
    tuned: Sequence[Tuned],
    head: Tensor,
    batches: Sequence[Batch],
    exact: Sequence[Tensor],
    progress: Progress | None = None,
) -> None:
    """Change the scales of `tuned`, matrices of `model`.

    `head` [V, H] is the dense model's, `exact` what it is given there: [T, H] for each batch.
    """
    optimizer = torch.optim.Adam([one.changes for one in tuned], betas=MOMENTS, eps=1e-12)
    for step in range(STEPS):
        number = step % len(batches)
        with torch.enable_grad():
            diverge(model, head, batches[number], exact[number])
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM) * (1 - step / STEPS)
        optimizer.step()
        for one in tuned:
            assert one.changes.grad is not None
            one.changes.grad.zero_()
            one.held.weight.detach().copy_(one.dense())
        if progress is not None:
            progress("tuning", (step + 1) / STEPS)


def diverge(model: Decoder, head: Tensor, batch: Batch, exact: Tensor) -> None:
    """Leave the gradients of how far the next token's distributions are from the dense model's, a token.

    The logits of all rows would not fit: the last hidden rows' gradient is gathered first, some rows at a time.
    """
    rows = model.forward(batch)
    ends = rows.detach().requires_grad_()
    some = max(1, LOGITS // len(head))
    for part, dense in zip(torch.split(ends, some), torch.split(exact, some), strict=True):
        with torch.no_grad():
            wanted = model.capped(F.linear(dense, head)).log_softmax(-1)
        loss = F.kl_div(model.logits(part).log_softmax(-1), wanted, reduction="sum", log_target=True)
        torch.autograd.backward(loss / len(rows))
    if rows.requires_grad:  # layers may all be dense
        torch.autograd.backward(rows, ends.grad)
