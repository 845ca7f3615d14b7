"""The CUDA backend's masks, on Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted

from anycore.contract import sampling
from anycore.contract.check_masks import check_masked
from anycore_cuda.kernels.masks import Places, constrain
from anycore_cuda.kernels.sampling import choose

BACKEND = interpreted()


def test_no_row_is_given_what_its_mask_forbids() -> None:
    check_masked(BACKEND)


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


@pytest.mark.parametrize("vocab", [31, 200, 4097])
def test_masked_on_the_way_is_masked_before(vocab: int) -> None:
    """The same ids, greedy, drawn and filtered, and the same logits left; NaN is heard of where a mask hides it."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).to(torch.int32) | 1
    rows = torch.tensor([4, 0, 2])
    places = Places()
    assert places.of(rows, 6).tolist() == [1, -1, 2, -1, 0, -1]
    assert places.of(rows, 6) is places.of(rows, 6)
    temperature, uniforms = torch.tensor([0.0, 0.0, 0.9, 0.9, 1.3, 1.3]), torch.rand(6, generator=generator)
    for top_k in (None, torch.tensor([5] * 6)):
        before, on_the_way = logits.clone(), logits.clone()
        constrain(before, rows, words)
        wanted, _ = choose(before, temperature, uniforms, top_k)
        ids, finite = choose(on_the_way, temperature, uniforms, top_k, masked=(places.of(rows, 6), words))
        assert torch.equal(on_the_way, before)
        assert ids.tolist() == wanted.tolist()
        assert finite.all()
    hidden = int((~sampling.allowed(words, vocab)[1]).nonzero()[0])  # the mask of row 0
    for wrong in (float("nan"), float("inf")):
        damaged = logits.clone()
        damaged[0, hidden] = wrong
        _, finite = choose(damaged, temperature, uniforms, masked=(places.of(rows, 6), words))
        assert finite.tolist() == [False] + [True] * 5
