"""Rows that keep to a grammar: what their masks forbid is struck out of the logits in place, with one launch."""

from __future__ import annotations

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
