"""The kit fails when the backend is wrong: each mistake that was made somewhere is made here on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from rig.limits import LimitError

from anycore.contract import checks
from anycore.contract.backend import Backend
from anycore.contract.batch import Batch
from anycore.contract.checks import AttentionCase
from anycore_ascend import memory
from anycore_ascend.ops import AscendOps, Plan

PAGED = AttentionCase("float16", 64, True, 128)
WINDOW = AttentionCase("float16", 64, True, 128, window=131)
PACKED = AttentionCase("float16", 64, False)


def inverted_mask(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ascend.ops, "mask", 1 - ascend.ops.mask)


def cumulative_key_lengths(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ascend.ops, "plan", lambda batch: Plan(batch.query_starts[1:], list(accumulate(batch.seq_lens))))


def query_lengths_of_their_own(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ascend.ops, "plan", lambda batch: Plan(batch.query_lens, batch.seq_lens))


def aligned_at_the_first_row(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    """Mode 2 instead of 3: right for whole prompts, wrong for the rest of one."""
    change(ascend, patch, lambda named: {**named, "sparse_mode": 2})


def window_one_too_wide(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    change(ascend, patch, lambda named: {**named, "pre_tokens": named["pre_tokens"] + 1})


def scale_left_at_one(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    change(ascend, patch, lambda named: {name: value for name, value in named.items() if name != "scale"})


def unpadded_head(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(memory, "padded", lambda size: size)

    def attention(q: Any, k: Any, v: Any, cache: Any, batch: Any, scale: float, window: Any, softcap: Any) -> Any:
        return ascend.ops._paged(q.contiguous(), k.contiguous(), v.contiguous(), cache, batch, scale, window)

    patch.setattr(ascend.ops, "attention", attention)


def causal_encoder(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    real = AscendOps._packed

    def packed(ops: AscendOps, q: Any, k: Any, v: Any, batch: Batch, *rest: Any) -> Any:
        return real(ops, q, k, v, replace(batch, causal=True), *rest)

    patch.setattr(AscendOps, "_packed", packed)


def nothing(ascend: Backend, patch: pytest.MonkeyPatch) -> None:
    """No mistake."""


def change(ascend: Backend, patch: pytest.MonkeyPatch, of: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    real = ascend.ops.fused
    patch.setattr(ascend.ops, "fused", lambda *args, **named: real(*args, **of(named)))


MISTAKES: list[tuple[Callable[[Backend, pytest.MonkeyPatch], None], AttentionCase]] = [
    (inverted_mask, PAGED),
    (cumulative_key_lengths, PAGED),
    (query_lengths_of_their_own, PAGED),
    (aligned_at_the_first_row, PAGED),
    (window_one_too_wide, WINDOW),
    (scale_left_at_one, PAGED),
    (nothing, replace(PAGED, block_size=16)),
    (unpadded_head, replace(PAGED, head_dim=96)),
    (causal_encoder, PACKED),
]


def check(ascend: Backend, case: AttentionCase) -> None:
    (checks.check_paged_attention if case.block_size else checks.check_packed_attention)(ascend, case)


@pytest.mark.parametrize(
    ("mistake", "case"), MISTAKES, ids=[m.__name__ if m is not nothing else "block_16" for m, _ in MISTAKES]
)
def test_the_kit_finds_it(
    ascend: Backend, monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., None], case: AttentionCase
) -> None:
    mistake(ascend, monkeypatch)
    with pytest.raises((AssertionError, LimitError)):
        check(ascend, case)


@pytest.mark.parametrize("case", [PAGED, WINDOW, PACKED, replace(PAGED, head_dim=96)], ids=str)
def test_without_mistakes_the_kit_passes(ascend: Backend, case: AttentionCase) -> None:
    check(ascend, case)
