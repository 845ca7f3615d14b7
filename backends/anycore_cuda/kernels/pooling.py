"""The mean of each request's rows, packed one after the other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.launch import launch

ROWS = 16
BLOCK = 128


@triton.jit
def _mean(rows_ptr, starts_ptr, out_ptr, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    begin = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < width
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * width + at[None, :]
        acc += tl.load(rows_ptr + place, mask=(row < end)[:, None] & known[None, :], other=0.0).to(tl.float32)
    out_at = request.to(tl.int64) * width + at
    tl.store(out_ptr + out_at, tl.sum(acc, axis=0) / (end - begin), mask=known)


def mean(rows: Tensor, starts: Tensor) -> Tensor:
    """Rows [T, H] of requests that begin at `starts` [B + 1] int32 → [B, H] float32."""
    count, width = len(starts) - 1, rows.shape[1]
    out = rows.new_empty(count, width, dtype=torch.float32)
    if out.numel():
        launch(_mean, (count, triton.cdiv(width, BLOCK)), rows.contiguous(), starts, out, width, ROWS=ROWS, BLOCK=BLOCK)
    return out
