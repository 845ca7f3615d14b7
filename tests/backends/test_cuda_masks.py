"""The CUDA backend's masks, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted

from anycore.contract import sampling
from anycore_cuda.kernels.masks import constrain

interpreted()


@pytest.mark.parametrize("vocab", [31, 64, 4097])
def test_masks_are_those_of_the_contract(vocab: int) -> None:
    """Of some rows, each bit drawn, the sign of a word included; further rows stay as they are."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).to(torch.int32)
    rows = torch.tensor([4, 0, 2])
    wanted = logits.clone()
    sampling.constrain(wanted, rows, words)
    constrain(logits, rows, words)
    assert torch.equal(logits, wanted)
    assert torch.isinf(logits).any()
