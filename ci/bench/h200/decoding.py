"""Decode attention at the lengths of the batch workload, and over a shared prefix, by kernel shape and splits.

The six best of what was tried, each with its time and share of the read limit (4.42 TB/s), then what the backend
chooses. Caches of several layers take turns, so that nothing is found in the L2 cache by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import next_power_of_2

from anycore_cuda.kernels import decode, prefix

Timer = Callable[[Callable[[], Any], int], float]
MODELS = ((14, 2, 64), (28, 4, 128))  # query heads, KV heads, head size: qwen2.5-0.5b and 7b
SHAPES = (
    (32, 1, 3), (32, 1, 5), (64, 1, 3), (64, 2, 3), (64, 2, 5), (64, 4, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3),
)  # fmt: skip
"""Keys a step, warps, pipeline stages."""
PREFIX_SHAPES = (
    (128, 64, 4, 3, 2), (128, 64, 8, 3, 1), (128, 64, 8, 3, 2), (64, 64, 4, 3, 2), (64, 64, 4, 2, 2), (64, 64, 4, 3, 4),
)  # fmt: skip
"""As `prefix.Shape`."""
SPLITS = (1, 2, 4, 8, 16)
COLD = 300 << 20
"""Bytes of all layers together, at least: several times the L2 cache."""


class Decoding:
    """One row of each request; the first `shared` tokens are the same blocks for all."""

    def __init__(self, model: tuple[int, int, int], lens: Sequence[int], shared: int = 0) -> None:
        heads, kv_heads, dim = model
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        columns = -(-max(lens) // 16)
        blocks = torch.randperm(len(lens) * columns, device="cuda") + 1
        self.tables = blocks.int().view(len(lens), columns)
        self.tables[:, : shared // 16] = self.tables[0, : shared // 16].clone()
        self.read = (sum(lens) - shared * (len(lens) - 1)) * kv_heads * dim * 4  # bytes, shared ones once
        shape = (2, 1 + len(blocks), kv_heads, 16, dim)
        layers = min(8, max(2, COLD // self.read))
        self.caches = [torch.randn(shape, **bf16) for _ in range(layers)]
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(lens), heads, dim, **bf16)
        self.tokens = torch.tensor([shared], dtype=torch.int32, device="cuda")
        self.counters = torch.zeros(8192, dtype=torch.int32, device="cuda")
        self.scale = dim**-0.5
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def plain(self, splits: int, shape: tuple[int, int, int] | None = None, found: Any = None, layer: int = 0) -> Any:
        out = torch.empty_like(self.q)
        given = self.q, self.caches[layer], out, self.tables, self.lens, self.counters, splits, self.scale, None, None
        decode.decode(*given, prefix=found, shape=shape)
        return out

    def shared(self, shape: prefix.Shape | None = None, layer: int = 0) -> Any:
        cache = self.caches[layer]
        return prefix.prefix(self.q, cache, self.tables, self.tokens, self.scale, None, self.processors, shape)


def compare(time: Timer) -> None:
    rng = random.Random(0)
    for model in MODELS:
        dim = next_power_of_2(model[2])
        for count in (1, 16, 64, 143, 256):
            run = Decoding(model, [rng.randint(200, 1700) for _ in range(count)])

            def layers(splits: int, shape: tuple[int, int, int] | None, run: Decoding = run) -> float:
                each = range(len(run.caches))
                return time(lambda: [run.plain(splits, shape, None, i) for i in each], 1) / len(each)

            tried = [(s, shape) for shape in SHAPES for s in SPLITS if 16 <= count * model[1] * s <= 4096 or count == 1]
            found = sorted(filter(None, (_timed(layers, *one) for one in tried)))
            ours = decode.splits_of(count, model[1], run.processors)
            chosen = (layers(ours, None), ours, decode.shape_of(dim, 2))
            for us, splits, shape in (*found[:6], chosen):
                rate = run.read / us / 4.42e6
                print(f"{model} {count} rows: {us:6.1f} us {rate:.2f} splits {splits} {shape}", flush=True)
        for count in (8, 64, 256):
            run = Decoding(model, [2048 + rng.randint(64, 128) for _ in range(count)], 2048)
            ours = decode.splits_of(count, model[1], run.processors)
            plain = run.plain(ours)
            apart = time(lambda run=run, ours=ours: run.plain(ours), 4)
            for shape in PREFIX_SHAPES:
                off = float((run.plain(ours, None, run.shared(shape)) - plain).abs().max())
                alone = time(lambda run=run, shape=shape: run.shared(shape), 4)
                both = time(lambda run=run, shape=shape, n=ours: run.plain(n, None, run.shared(shape)), 4)
                print(
                    f"{model} {count} rows, 2048 shared {shape}: prefix {alone:6.1f} us, with the rest {both:6.1f}, "
                    f"read again for each {apart:6.1f}; off by {off:.4f}",
                    flush=True,
                )


def _timed(time: Callable[..., float], splits: int, shape: Any) -> tuple[float, int, Any] | None:
    try:
        return time(splits, shape), splits, shape
    except Exception as error:  # a shape that does not fit
        print(shape, type(error).__name__, error)
        return None
