"""Rows that keep to a grammar: what their masks forbid is struck out of the logits in place, with one launch.

Where nothing else is done to logits, `sampling.choose` does it on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.launch import launch

BLOCK = 4096


@triton.jit
def _constrain(logits_ptr, rows_ptr, words_ptr, stride, words_stride, vocab, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < vocab
    word = tl.load(words_ptr + i * words_stride + at // 32, mask=there, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    struck = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(logits_ptr + tl.load(rows_ptr + i) * stride + at, struck, mask=there & forbidden)


def constrain(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Leave rows [K] of logits [R, V] float32 only the ids that words [K, ceil(V / 32)] int32 allow."""
    vocab = logits.shape[1]
    launch(
        _constrain, (len(rows), triton.cdiv(vocab, BLOCK)),
        logits, rows, words, logits.stride(0), words.stride(0), vocab, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


class Places:
    """Which row of a step has which mask, kept for as long as the same rows have one."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._places = torch.zeros(0)

    def of(self, rows: Tensor, count: int) -> Tensor:
        """Rows [K] int64 → [count] int32: the place of each row in `rows`, -1 for those that are not there."""
        if self._rows is not rows or len(self._places) != count:
            self._places = torch.full((count,), -1, dtype=torch.int32, device=rows.device)
            every = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            self._places.index_copy_(0, rows, every)
            self._rows = rows
        return self._places
