"""Attention without a cache as torch's own operator computes it: requests padded to one length, and a bool mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract.batch import Batch


def padded_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, scale: float, window: int | None) -> Tensor:
    """q and result [T, Hq, D]; k, v [T, Hkv, D]. A mask of floats would leave the fused path, so it is of bools."""
    lens = torch.tensor(batch.query_lens)
    longest = int(lens.max())
    inside = torch.arange(longest) < lens[:, None]
    rows = inside.flatten().nonzero()[:, 0].to(q.device)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))

    def spread(x: Tensor) -> Tensor:
        wide = x.new_zeros(len(lens) * longest, *x.shape[1:])
        return wide.index_copy_(0, rows, x).view(len(lens), longest, *x.shape[1:]).transpose(1, 2)

    distance = torch.arange(longest)[:, None] - torch.arange(longest)
    seen = inside[:, None, None, :].expand(-1, 1, longest, -1)
    if batch.causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    # A row of padding would see nothing where a window ends before the text does; softmax of nothing is NaN.
    seen = seen | torch.eye(longest, dtype=torch.bool)
    out = F.scaled_dot_product_attention(spread(q), spread(k), spread(v), attn_mask=seen.to(q.device), scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)
