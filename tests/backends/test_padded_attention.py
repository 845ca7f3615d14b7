"""Attention over padded requests is attention over packed ones, whoever may see whom."""

from __future__ import annotations

import pytest
import torch

from anycore.contract.batch import Batch
from anycore.contract.reference import packed_attention, padded_attention


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_nothing(causal: bool, window: int | None) -> None:
    lens = [1, 9, 3, 9]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lens), heads, 16, generator=generator) for heads in (4, 2, 2))
    ids = torch.zeros(sum(lens), dtype=torch.int64)
    batch = Batch(ids, ids, lens, [0] * len(lens), None, causal)
    found = padded_attention(q, k, v, batch, 0.3, window)
    torch.testing.assert_close(found, packed_attention(q, k, v, batch, 0.3, window, None))
