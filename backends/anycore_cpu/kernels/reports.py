"""The kernel of log-probabilities as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from anycore_cpu.kernels.attention import address, expect
from anycore_cpu.kernels.library import Kernels

Report = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def report(kernels: Kernels, raw: Tensor, ids: Tensor, count: int, rows: Tensor | None = None) -> Report:
    """As `contract.sampling.report`, equals by their ids, of rows [K] of logits raw [R, V] float32; None: of all."""
    logprobs, ranks, top_ids, top_logprobs = _report(kernels, raw, ids[:, None], min(count, raw.shape[1]), rows)
    return logprobs[:, 0], ranks, *((top_ids, top_logprobs) if count else (None, None))


def named(kernels: Kernels, raw: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [R, N] of ids [R, N] int64 by logits raw [R, V] float32."""
    return _report(kernels, raw, ids, 0, None)[0]


def spread(found: Report, rows: Tensor, height: int) -> Report:
    """What was found of rows [K], in tables of `height` rows; of the others NaN, and ids and ranks of 0."""
    logprobs, ranks, top_ids, top_logprobs = found
    return (
        torch.full((height,), torch.nan).index_copy_(0, rows, logprobs),
        ranks.new_zeros(height).index_copy_(0, rows, ranks),
        None if top_ids is None else top_ids.new_zeros(height, top_ids.shape[1]).index_copy_(0, rows, top_ids),
        None
        if top_logprobs is None
        else torch.full((height, top_logprobs.shape[1]), torch.nan).index_copy_(0, rows, top_logprobs),
    )


def _report(
    kernels: Kernels, raw: Tensor, ids: Tensor, top: int, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    height, vocab = raw.shape
    reported = height if rows is None else len(rows)
    expect("logits", raw, torch.float32, height, vocab)
    expect("ids", ids, torch.int64, reported, ids.shape[1])
    expect("rows", rows, torch.int64, reported)
    raw, ids, rows = raw.contiguous(), ids.contiguous(), None if rows is None else rows.contiguous()
    logprobs, ranks = torch.empty(ids.shape, dtype=torch.float32), torch.empty(reported, dtype=torch.int64)
    top_ids = torch.empty(reported, top, dtype=torch.int64)
    top_logprobs = torch.empty(reported, top, dtype=torch.float32)
    kernels.library.anycore_report(
        raw.data_ptr(),
        vocab,
        address(rows),
        reported,
        ids.data_ptr(),
        ids.shape[1],
        top,
        logprobs.data_ptr(),
        ranks.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
    )
    return logprobs, ranks, top_ids, top_logprobs
