"""The CUDA backend's kernels in Triton's interpreter, by the conformance kit's own float64 checks."""

from __future__ import annotations

import pytest
from backends.cuda_interpreted import interpreted

from anycore.contract import checks
from anycore.contract.checks import AttentionCase

DTYPES = ("float32", "float16")
CASES = [
    AttentionCase("float32", 16, True, 16, None, None, 6, 2, 0),
    AttentionCase("float16", 80, True, 16, None, None, 4, 4, 1),
    AttentionCase("float32", 64, True, 32, 19, None, 4, 1, 2),
    AttentionCase("float16", 32, True, 16, 5, 3.0, 6, 2, 3),
    AttentionCase("float32", 32, True, 16, None, 3.0, 14, 2, 4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("processors", [1, 40])
def test_paged_attention(case: AttentionCase, processors: int) -> None:
    checks.check_paged_attention(interpreted(processors), case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
def test_packed_attention(case: AttentionCase, causal: bool) -> None:
    here = AttentionCase(case.dtype, case.head_dim, causal, 0, case.window, case.softcap, case.heads, case.kv_heads)
    checks.check_packed_attention(interpreted(), here)
    checks.check_company(interpreted(), here)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_norms(dtype: str) -> None:
    for rows, width in ((1, 48), (5, 77)):
        for with_residual in (False, True):
            checks.check_norms(interpreted(), dtype, rows, width, with_residual)


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_gated(dtype: str) -> None:
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        checks.check_gated(interpreted(), dtype, kind, 3, 33)


def test_sampling() -> None:
    checks.check_sampling(interpreted())
