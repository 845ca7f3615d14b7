"""Attention over packed requests: the backend's kernel in several shapes beside what torch brings along.

For each: the difference from the first row, the first call (which may build a plan), the host's time where lengths
change from call to call, the device's time, and the share of the matrix limit (797 TFLOP/s).
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from anycore_cuda.kernels import attention

Attend = Callable[["Packed"], torch.Tensor]
SHAPES = (
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2),
)  # fmt: skip
"""Rows of a tile, keys a step, warps, pipeline stages."""


class Packed:
    """Requests of these lengths, side by side."""

    def __init__(self, heads: int, kv_heads: int, dim: int, causal: bool, dtype: torch.dtype, lens: list[int]) -> None:
        self.causal, self.scale, self.longest = causal, dim**-0.5, max(lens)
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.starts = torch.nn.functional.pad(self.lens.cumsum(0), (1, 0)).int()
        qkv = torch.randn(sum(lens), heads + 2 * kv_heads, dim, dtype=dtype, device="cuda")
        self.q, self.k, self.v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        self.flops = 4 * sum(n * n for n in lens) * heads * dim / (1 + causal)
        self.tiles: dict[int, torch.Tensor] = {}
        for rows in (64, 128):
            each = rows // (heads // kv_heads)
            found = sorted(((i, first) for i, n in enumerate(lens) for first in range(0, n, each)), key=lambda t: -t[1])
            self.tiles[rows] = torch.tensor(found, dtype=torch.int32, device="cuda")


def ours(shape: tuple[int, int, int, int]) -> Attend:
    def attend(at: Packed) -> torch.Tensor:
        rows = shape[0]
        out = torch.empty(at.q.shape, dtype=at.q.dtype, device="cuda")
        attention.attend(
            at.q, at.k, at.v, out, at.tiles[rows], rows, at.starts, at.lens, None,
            at.causal, at.scale, None, None, shape[1:],
        )  # fmt: skip
        return out

    return attend


def flash(at: Packed) -> torch.Tensor:
    packed = (at.q, at.k, at.v, at.starts, at.starts, at.longest, at.longest)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(*packed, 0.0, at.causal, False, scale=at.scale)[0]
    return found


def cudnn(at: Packed) -> torch.Tensor:
    packed = (at.q, at.k, at.v, None, at.starts, at.starts, at.longest, at.longest)
    found: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
        *packed, False, 0.0, at.causal, False, scale=at.scale
    )[0]
    return found


def cudnn_equal(at: Packed) -> torch.Tensor:
    """Not for packed requests but for equal ones."""
    q, k, v = (x.unflatten(0, (len(at.lens), at.longest)).transpose(1, 2) for x in (at.q, at.k, at.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, is_causal=at.causal, scale=at.scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def measure(attend: Attend, sets: list[Packed], right: torch.Tensor | None) -> dict[str, Any]:
    start = time.perf_counter()
    out = attend(sets[0])
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    host = []
    for packed in sets[1:]:
        start = time.perf_counter()
        attend(packed)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    ms = do_bench(lambda: attend(sets[0]), warmup=10, rep=40, return_mode="median")
    difference = 0.0 if right is None else float((out - right).abs().max())
    return {
        "difference": round(difference, 5),
        "first_ms": round(1e3 * first, 1),
        "host_us": round(1e6 * statistics.median(host), 1),
        "device_us": round(1e3 * ms, 1),
        "share": round(sets[0].flops / 797e9 / ms, 3),
    }


def compare() -> None:
    rng = random.Random(0)
    mixed = [[rng.randint(16, 512) for _ in range(30)] for _ in range(9)]
    equal = [[2048 - 64 * i] * 4 for i in range(9)]
    cases: dict[str, tuple[Any, ...]] = {
        "28/4x128 causal 4x2048": (28, 4, 128, True, torch.bfloat16, equal),
        "14/2x64 causal 4x2048": (14, 2, 64, True, torch.bfloat16, equal),
        "12/12x64 30x16..512": (12, 12, 64, False, torch.float16, mixed),
        "16/8x128 causal 30x16..512": (16, 8, 128, True, torch.bfloat16, mixed),
    }
    for name, (heads, kv_heads, dim, causal, dtype, lens) in cases.items():
        sets = [Packed(heads, kv_heads, dim, causal, dtype, one) for one in lens]
        right = ours(SHAPES[0])(sets[0])
        ways: dict[str, Attend] = {f"ours {shape}": ours(shape) for shape in SHAPES}
        ways |= {"flash": flash, "cudnn": cudnn} | ({"cudnn, equal": cudnn_equal} if lens is equal else {})
        for way, attend in ways.items():
            try:
                print(json.dumps({"case": name, "way": way} | measure(attend, sets, right)), flush=True)
            except Exception as error:  # what one build of torch lacks is a result here
                print(json.dumps({"case": name, "way": way, "error": f"{error!r}"[:200]}), flush=True)


if __name__ == "__main__":
    compare()
