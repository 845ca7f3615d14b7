"""What the CPU kernels are not called with: tensors that do not belong together are refused before C is entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract.batch import Batch, Sampling
from anycore.contract.rounded import RoundedCache
from anycore_cpu.kernels import ends
from anycore_cpu.kernels.attention import KernelPlan
from anycore_cpu.kernels.library import Kernels

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_of(LEVELS[0])


def plan(**changed: Any) -> KernelPlan:
    """Two requests of 1 and 2 rows, with blocks of 4."""
    longs = torch.zeros(3, dtype=torch.int64)
    given: dict[str, Any] = {"slots": torch.tensor([4, 8, 9]), "block_tables": torch.tensor([[1], [2]]).int()}
    batch = Batch(longs, longs, [1, 2], [0, 0], None, True, kv=[None], block_size=4, **(given | changed))
    return KernelPlan(batch)


def layer(**changed: Any) -> dict[str, Any]:
    """Arguments of a call that is right: 4 heads on 2, of 8."""
    right: dict[str, Any] = {
        "plan": plan(),
        "q": torch.ones(3, 4, 8),
        "k": torch.ones(3, 2, 8),
        "v": torch.ones(3, 2, 8),
        "cache": torch.zeros(3, 2, 2, 4, 8),
        "scale": 1.0,
    }
    return right | changed


def rounded(dtype: torch.dtype, block: int = 4) -> RoundedCache:
    return RoundedCache(torch.zeros(3, 2, 2, block, 8).to(dtype), torch.zeros(3, 2, 2, block, dtype=BF16))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.ones(3, 4, 8).half()}, r"float32 or bfloat16, not torch\.float16"),
    ({"k": torch.ones(3, 2, 8, dtype=BF16)}, r"k: .* torch\.float32 \(3, 2, 8\), .* torch\.bfloat16"),
    ({"q": torch.ones(2, 4, 8)}, r"q: .* \(3, 4, 8\), .* \(2, 4, 8\)"),
    ({"q": torch.ones(3, 3, 8)}, r"fewer heads of k: \(3, 3, 8\), \(3, 2, 8\)"),
    ({"v": torch.ones(3, 2, 16)}, r"v: .* \(3, 2, 8\), .* \(3, 2, 16\)"),
    ({"cache": torch.zeros(3, 2, 2, 8, 8)}, r"cache: .* \(3, 2, 2, 4, 8\), .* \(3, 2, 2, 8, 8\)"),
    ({"cache": torch.zeros(3, 2, 2, 4, 8, dtype=BF16)}, r"cache: .* torch\.bfloat16"),
    ({"cache": torch.zeros(3, 2, 2, 8, 4).transpose(3, 4)}, "one run of memory"),
    ({"cache": rounded(torch.float16)}, r"int8 or float8_e4m3fn, not of torch\.float16"),
    ({"cache": rounded(torch.int8, block=8)}, r"scales: .* \(3, 2, 2, 4\), .* \(3, 2, 2, 8\)"),
    (
        {"cache": RoundedCache(torch.zeros(3, 2, 2, 4, 9).char(), rounded(torch.int8).scale)},
        r"cache: .*\(3, 2, 2, 4, 9\)",
    ),
    ({"plan": plan(slots=None)}, "slots and block tables"),
    ({"plan": plan(slots=torch.zeros(2, dtype=torch.int64))}, r"slots: .* \(3,\), .* \(2,\)"),
    ({"plan": plan(slots=torch.zeros(3).int())}, r"slots: .* torch\.int64 .* torch\.int32"),
    ({"plan": plan(block_tables=torch.zeros(1, 1).int())}, r"block tables: .* \(2, 1\), .* \(1, 1\)"),
    ({"window": -1}, "window: at least 1 token, not -1"),
    ({"norms": (torch.ones(8), torch.ones(4), 1e-6)}, r"k_norm: .* \(8,\), .* \(4,\)"),
    ({"angles": (torch.ones(3, 4), torch.ones(3, 8))}, r"sin: .* \(3, 4\), .* \(3, 8\)"),
    ({"angles": (torch.ones(3, 4), torch.ones(3, 4)), "q": torch.ones(3, 8, 4).transpose(1, 2)}, "side by side"),
]


def test_attention_takes_what_belongs_together(kernels: Kernels) -> None:
    assert kernels.attend(**layer()).shape == (3, 4, 8)


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_attention_refuses_what_does_not(kernels: Kernels, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.attend(**layer(**changed))


def test_rows_meet_weights_of_their_own_width(kernels: Kernels) -> None:
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"weight: .* \(8,\), .* \(7,\)"):
        kernels.norm(x, None, torch.ones(7), None, 1e-6, centred=False)
    with pytest.raises(ValueError, match=r"residual: .* \(3, 8\), .* \(2, 8\)"):
        kernels.norm(x, torch.ones(2, 8), torch.ones(8), None, 1e-6, centred=False)
    with pytest.raises(ValueError, match=r"bias: .* \(8,\), .* \(1,\)"):
        kernels.norm(x, None, torch.ones(8), torch.ones(1), 1e-6, centred=True)
    with pytest.raises(ValueError, match="two halves, not of 7"):
        kernels.activation(torch.ones(3, 7), "silu", gated=True)
    with pytest.raises(ValueError, match=r"bias: .* \(5,\), .* \(8,\)"):
        kernels.linear(x, kernels.pack(torch.ones(5, 8)), torch.ones(8))


@pytest.mark.parametrize(
    ("logits", "changed", "message"),
    [
        (torch.zeros(2, 5, dtype=BF16), {}, r"logits: .* torch\.float32 .* torch\.bfloat16"),
        (torch.zeros(2, 5), {"temperature": torch.ones(1)}, r"temperature: .* \(2,\), .* \(1,\)"),
        (torch.zeros(2, 5), {"uniforms": torch.ones(2)}, r"uniforms: .* torch\.float64 .* torch\.float32"),
        (torch.zeros(2, 5), {"top_k": torch.ones(2).int()}, r"top_k: .* torch\.int64 .* torch\.int32"),
    ],
)
def test_sampling_takes_a_number_a_row(
    kernels: Kernels, logits: Tensor, changed: dict[str, Tensor], message: str
) -> None:
    given = {"temperature": torch.ones(2), "uniforms": torch.zeros(2, dtype=torch.float64)} | changed
    with pytest.raises(ValueError, match=message):
        ends.choose(kernels, logits, Sampling(**given))
