"""act(gate) * up in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.launch import launch

KINDS = ("silu", "gelu", "gelu_tanh", "relu")
BLOCK = 1024


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is the logistic function of 2y.
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return tl.maximum(x, 0.0)


@triton.jit
def _gated(x_ptr, out_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=inside, other=0.0)
    # Rounded where Hugging Face's activation ends, so that the product sees the same number.
    act = activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + at, (act * up.to(tl.float32)).to(gate.dtype), mask=inside)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r} is not one of {', '.join(KINDS)}")


def gated(x: Tensor, kind: str, early: bool = False) -> Tensor:
    """[.., 2I] → [.., I]."""
    check_kind(kind)
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], width)
    rows = out.numel() // width
    if rows:
        launch(
            _gated, (rows, triton.cdiv(width, BLOCK)),
            x, out, width, KIND=kind, BLOCK=BLOCK, EARLY=early, num_warps=4, **launch_options(early),
        )  # fmt: skip
    return out
