"""The CUDA backend's rounded KV cache in Triton's interpreter, by the conformance kit's own float64 checks."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract import check_cache, checks
from anycore.contract.checks import AttentionCase
from anycore.contract.rounded import TYPES, RoundedCache, round_rows
from anycore.contract.sizes import KVSpec
from anycore_cuda.cache import allocate
from anycore_cuda.kernels import rotary

CASES = [
    AttentionCase("float16", 24, True, 16, 19, None, 2, 1, 1, "int8"),
    AttentionCase("float32", 16, True, 16, None, 3.0, 2, 1, 2, "fp8"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: AttentionCase) -> None:
    checks.check_paged_attention(interpreted(4), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_is_stored_alike_however_it_comes(case: AttentionCase) -> None:
    check_cache.check_stored_alike(interpreted(), case, one_by_one=False)
    check_cache.check_unusual(interpreted(), case)


def test_a_shared_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        backend = interpreted()
        monkeypatch.setattr(type(backend.ops), "shares", lambda self, batch: batch.shared_tokens >= 64)
        run = checks.PagedRun(backend, case, longest=100)
        run.step({0: 66})
        run.fork(0, 1)
        run.step({1: 3})
        run.step({0: 1, 1: 1})


def test_memory() -> None:
    caches = [KVSpec(3, 2, 80, 16, "float16", kind) for kind in TYPES]
    check_cache.check_memory(interpreted(), caches, blocks=5)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("fused", [False, True])
def test_numbers_are_the_contracts_own(kind: str, fused: bool) -> None:
    """Ordinary rows, ties among them, alone and after the projection: the same numbers and scales."""
    generator = torch.Generator().manual_seed(4)
    rows, kv_heads, dim, size = 70, 2, 24, 16
    qkv = torch.randn(rows, 3 + 2 * kv_heads, dim, generator=generator).half()
    qkv[:, :, :12] = (qkv[:, :, :12] * 8).round() / 8  # some lie in the middle between two numbers
    qkv[::3] *= 300
    qkv[5], qkv[6, 4, 2] = 0.0, float("nan")
    cache = allocate(KVSpec(1, kv_heads, dim, size, "float16", kind), 8, torch.device("cpu"))[0]
    assert isinstance(cache, RoundedCache)
    slots = torch.randperm(8 * size, generator=generator)[:rows]
    _, k, v = qkv.split_with_sizes((3, kv_heads, kv_heads), dim=1)
    if fused:
        rotary.prepare_heads(qkv, 3, kv_heads, None, None, cache, slots)
    else:
        rotary.store(k, v, cache, slots)

    def at_slots(x: Tensor) -> Tensor:
        return x[slots // size, :, slots % size]

    for side, given in enumerate((k, v)):
        data, scale = round_rows(given, cache.dtype)
        torch.testing.assert_close(at_slots(cache.scale[side]), scale, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(at_slots(cache.data[side].float()), data.float())
