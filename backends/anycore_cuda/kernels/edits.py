"""What changes logits in place before an id is chosen: penalties of some rows, single ids raised, lowered or banned."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.batch import IN_PROMPT, Penalties
from anycore_cuda.kernels.launch import launch

BLOCK = 4096
EDITS = 512


@triton.jit
def _penalise(
    logits_ptr, counts_ptr, rows_ptr, places_ptr, repetition_ptr, presence_ptr, frequency_ptr, stride, vocab,
    IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr = logits_ptr + tl.load(rows_ptr + i) * stride + at
    x = tl.load(x_ptr, mask=at < vocab, other=0.0)
    count = tl.load(counts_ptr + tl.load(places_ptr + i) * vocab + at, mask=at < vocab, other=0)
    factor = tl.load(repetition_ptr + i)
    generated = (count & (IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(count > 0, tl.where(x > 0, x / factor, x * factor), x)
    x = x - tl.load(frequency_ptr + i) * generated
    x = tl.where(generated > 0, x - tl.load(presence_ptr + i), x)
    tl.store(x_ptr, x, mask=at < vocab)


@triton.jit(do_not_specialize=["count"])
def _edit(logits_ptr, rows_ptr, ids_ptr, values_ptr, stride, count, BAN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    row, i = tl.load(rows_ptr + at, mask=there, other=0), tl.load(ids_ptr + at, mask=there, other=0)
    if BAN:
        x = tl.full([BLOCK], float("-inf"), tl.float32)
    else:
        x = tl.load(logits_ptr + row * stride + i, mask=there, other=0.0)
        x += tl.load(values_ptr + at, mask=there, other=0.0)
    tl.store(logits_ptr + row * stride + i, x, mask=there)


def penalise(logits: Tensor, p: Penalties) -> None:
    """Apply penalties to the rows that have any."""
    vocab = logits.shape[1]
    launch(
        _penalise, (len(p.rows), triton.cdiv(vocab, BLOCK)),
        logits, p.counts, p.rows, p.places, p.repetition, p.presence, p.frequency, logits.stride(0), vocab,
        IN_PROMPT=IN_PROMPT, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def add(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values to single logits, no id of a row twice."""
    _launch_edit(logits, rows, ids, values, ban=False)


def ban(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Let single ids have no probability."""
    _launch_edit(logits, rows, ids, logits, ban=True)


def _launch_edit(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor, ban: bool) -> None:
    count = len(rows)
    launch(
        _edit, (triton.cdiv(count, EDITS),),
        logits, rows, ids, values, logits.stride(0), count, BAN=ban, BLOCK=EDITS, num_warps=4,
    )  # fmt: skip
