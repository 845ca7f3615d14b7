"""What users of other engines reported from Ascend machines, each as a test of this backend or of its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from engines import engine, run
from rig.install import CALLS
from rig.limits import LimitError

from anycore.contract import checks
from anycore.contract.backend import Backend, KVSpec
from anycore.contract.checks import AttentionCase
from anycore.contract.declare import Need, Task, find
from anycore.errors import Unsupported
from anycore_ascend.support import SPEC

FUSED = "npu::npu_fused_infer_attention_score"


def causal(**changes: Any) -> Need:
    fields = {"architecture": "LlamaForCausalLM", "weights": "bfloat16", "head_dim": 128, "chip": "910B"}
    return Need(Task.GENERATE, "causal", **{**fields, **changes})


def test_sglang_38196_blocks_of_16_are_refused_before_anything_is_loaded() -> None:
    """Fluent garbage on 910C."""
    with pytest.raises(Unsupported, match="block size 16 is not among 128"):
        find(SPEC.support, causal(block_size=16))
    assert find(SPEC.support, causal(block_size=128)).block_sizes == (128,)


def test_one_to_one_heads_in_float16_reach_a_kernel_that_takes_them(ascend: Backend) -> None:
    """The kernel that takes other head sizes takes bfloat16 only; 561002 is what users saw."""
    checks.check_paged_attention(ascend, AttentionCase("float16", 80, True, 128, heads=4, kv_heads=4))
    q = torch.zeros(1, 4, 192, dtype=torch.float16, device="npu")
    pages = torch.zeros(2, 128, 4 * 192, dtype=torch.float16, device="npu")
    with pytest.raises(LimitError, match="bfloat16 only"):
        attend(ascend, q, pages, num_heads=4, num_key_value_heads=4)


def test_vllm_ascend_8045_head_sizes_off_the_list_are_padded_or_computed_in_torch(ascend: Backend) -> None:
    for size in (96, 256):
        checks.check_paged_attention(ascend, AttentionCase("float16", size, True, 128, window=131))
    pages = torch.zeros(2, 128, 2 * 96, dtype=torch.bfloat16, device="npu")
    with pytest.raises(LimitError, match="not 96"):
        attend(ascend, torch.zeros(1, 4, 96, dtype=torch.bfloat16, device="npu"), pages)


def test_vllm_ascend_15503_decoding_takes_lengths_and_no_mask_of_its_own(ascend: Backend) -> None:
    """A mask [1, 1, 1, S] was ignored past position 512."""
    q, pages = torch.zeros(1, 4, 128, dtype=torch.float16, device="npu"), pages_of(128)
    mask = torch.zeros(1, 1, 1, 128, dtype=torch.bool, device="npu")
    with pytest.raises(LimitError, match="sparse_mode 0 takes no atten_mask"):
        attend(ascend, q, pages, sparse_mode=0, atten_mask=mask)
    seen: list[dict[str, Any]] = []
    real = ascend.ops.fused

    def spy(*args: Any, **named: Any) -> Any:
        seen.append(named)
        return real(*args, **named)

    ascend.ops.fused = spy
    try:
        checks.check_paged_attention(ascend, AttentionCase("float16", 128, True, 128))
    finally:
        ascend.ops.fused = real
    assert all(call["atten_mask"] is ascend.ops.mask and call["sparse_mode"] == 3 for call in seen)
    assert any(call["actual_seq_lengths"] == list(range(1, 5)) for call in seen), "no step decoded only"


@pytest.mark.parametrize("slots", [[0, -1], [5, 5], [0, 256]], ids=["minus-one", "repeated", "beyond"])
def test_slots_that_nobody_owns_are_refused(slots: list[int]) -> None:
    cache = torch.zeros(2, 128, 2, 64, dtype=torch.float16, device="npu")
    rows = torch.zeros(2, 2, 64, dtype=torch.float16, device="npu")
    places = torch.tensor(slots, device="npu")
    with pytest.raises(LimitError, match="slot"):
        torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), places, cache_mode="Norm")


def test_a_cache_in_the_default_layout_of_tiles_is_refused() -> None:
    cache = torch.zeros(2, 128, 2, 64, dtype=torch.float16, device="npu")
    rows = torch.zeros(1, 2, 64, dtype=torch.float16, device="npu")
    with pytest.raises(LimitError, match="PA_NZ"):
        torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), torch.tensor([0], device="npu"))


def test_vllm_ascend_13699_encoders_do_not_use_the_operator_that_averaged(t_bert: Path) -> None:
    made = engine(t_bert, backend="ascend", dtype="float16")
    before = CALLS[FUSED]
    run(made, [[5, 6, 7], [8, 9]])
    assert CALLS[FUSED] == before
    assert not made.runner.backend.fallbacks


def test_h06_nothing_is_computed_by_a_stand_in_unsaid(t_lm: Path) -> None:
    made = engine(t_lm, backend="ascend", dtype="bfloat16")
    run(made, [[5, 6, 7]])
    assert not made.runner.backend.fallbacks


def test_h10_bfloat16_is_never_lowered_on_a_chip_without_it() -> None:
    with pytest.raises(Unsupported, match="no bfloat16"):
        find(SPEC.support, causal(chip="310P"))


def test_memory_that_is_not_there_is_an_error_and_leaves_the_rest(ascend: Backend) -> None:
    free = ascend.memory.free()
    kv = KVSpec(4, 8, 128, 128, "bfloat16")
    with pytest.raises(torch.OutOfMemoryError):
        ascend.memory.allocate_kv(kv, free // ascend.memory.block_bytes(kv) + 8)
    torch.npu.empty_cache()
    assert ascend.memory.free() >= free - 2**21  # a segment may stay
    assert len(ascend.memory.allocate_kv(kv, 4)) == 4


def pages_of(size: int) -> torch.Tensor:
    return torch.zeros(2, 128, 2 * size, dtype=torch.float16, device="npu")


def attend(ascend: Backend, q: torch.Tensor, pages: torch.Tensor, **changes: Any) -> Any:
    """One decoding request over two heads of keys, but for the changes."""
    right = {"atten_mask": ascend.ops.mask, "num_heads": 4, "num_key_value_heads": 2, "sparse_mode": 3, "scale": 0.1}
    table = torch.tensor([[1]], dtype=torch.int32, device="npu")
    lengths = {"actual_seq_lengths": [1], "actual_seq_lengths_kv": [9], "block_table": table, "block_size": 128}
    named = {"input_layout": "TND", **lengths, **right, **changes}
    return torch_npu.npu_fused_infer_attention_score(q, pages, pages.clone(), **named)
