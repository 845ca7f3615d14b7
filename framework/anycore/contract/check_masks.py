"""The kit's check of masks: no row is ever given an id that its grammar does not allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anycore.contract.batch import Sampling
from anycore.contract.checks import close

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

IDS = 70  # no whole number of words


def check_masked(backend: Backend) -> None:
    """Every id is allowed alone in a row of its own; rows without a mask lie between and are drawn from freely."""
    upload = backend.memory.upload
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(2 * IDS, IDS, generator=generator)
    masked = torch.arange(0, 2 * IDS, 2)
    words = torch.zeros(IDS, -(-IDS // 32), dtype=torch.int64)
    words[torch.arange(IDS), torch.arange(IDS) // 32] = 1 << (torch.arange(IDS) % 32)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)  # the highest bit is the sign
    for temperature in (0.0, 1.0):
        params = Sampling(
            temperature=upload(torch.full((2 * IDS,), temperature)),
            uniforms=upload(torch.rand(2 * IDS, generator=generator).to(backend.ops.draw_dtype)),
            masked=(upload(masked), upload(words)),
            logprobs=1,
        )
        got = backend.ops.sample(upload(logits.clone()), params)
        ids = got.ids.cpu()
        assert torch.equal(ids[masked], torch.arange(IDS)), f"masks that allow one id each gave {ids[masked].tolist()}"
        if not temperature:
            assert torch.equal(ids[masked + 1], logits[masked + 1].argmax(-1)), "a mask reached a row without one"
        assert got.logprobs is not None
        raw = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
        close(got.logprobs, raw, "float32", "log-probabilities of masked rows")
