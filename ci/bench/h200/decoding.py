"""Decode attention by kernel shape and splits, at equal and at random lengths, beside what the backend does now.

PYTHONPATH=framework:backends python ci/bench/h200/decoding.py [ROWS ...] > decoding.txt

Heads come as the projection leaves them, as in steps that only decode. A result: microseconds a layer, the share of the
read limit (4.42 TB/s), the error against float64, with WRONG where that is too much, where a second run gave other
numbers or where a counter was left. Caches of several layers take turns, so that nothing is found in the L2 cache.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from ahead import only_compile
from torch import Tensor
from triton import next_power_of_2

from anycore_cuda.kernels import decode

READ = 4.42e6
"""Bytes a microsecond."""
MODELS = ((28, 4, 128), (14, 2, 64))  # query heads, KV heads, head size: qwen2.5-7b and 0.5b
ROWS = (1, 8, 32, 64, 144, 256)
COLD = 300 << 20
"""Bytes of all layers together, at least: several times the L2 cache."""
TOLERANCE = 8e-3
PROCESSORS = 132


SHAPES = {
    128: ((64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 3), (32, 4, 4)),
    64: ((128, 4, 2), (128, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4)),
}
"""Keys a step, warps, pipeline stages."""


def lengths(kind: str, rows: int) -> list[int]:
    rng = random.Random(rows)
    return [1000 if kind == "equal" else rng.randint(100, 2048) for _ in range(rows)]


class Decoding:
    """One row of each request, with the caches of some layers."""

    def __init__(self, model: tuple[int, int, int], lens: Sequence[int], device: str = "cuda") -> None:
        heads, kv_heads, dim = model
        self.model, self.device = model, device
        bf16 = {"device": device, "dtype": torch.bfloat16}
        columns = -(-max(lens) // 16)
        blocks = torch.randperm(len(lens) * columns, device=device) + 1
        self.tables = blocks.int().view(len(lens), columns)
        self.read = sum(lens) * kv_heads * dim * 4  # bytes
        layers = min(8, max(2, -(-COLD // self.read))) if device == "cuda" else 1
        self.caches = [torch.randn(2, 1 + len(blocks), kv_heads, 16, dim, **bf16) for _ in range(layers)]
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.order = self.lens.argsort(descending=True).int()
        self.qkv = torch.randn(len(lens), heads + 2 * kv_heads, dim, **bf16)
        last = self.lens.long() - 1
        slots = self.tables[torch.arange(len(lens), device=device), last // 16].long() * 16 + last % 16
        still = torch.ones(len(lens), dim // 2, device=device), torch.zeros(len(lens), dim // 2, device=device)
        self.raw = decode.Raw(None, still, slots)  # by an angle of nothing, so that heads stay what they are
        self.counters = torch.zeros(8192, dtype=torch.int32, device=device)

    def given(self, layer: int) -> tuple[Any, ...]:
        q = self.qkv[:, : self.model[0]]
        out = torch.empty(q.shape, dtype=q.dtype, device=self.device)
        return q, self.caches[layer], out, self.tables, self.lens, self.counters

    @property
    def splits(self) -> int:
        return decode.splits_of(len(self.lens), self.model[1], PROCESSORS)

    def split(self, layer: int = 0, splits: int | None = None, shape: tuple[int, int, int] | None = None) -> Tensor:
        """As the backend does now, or with other splits or another shape."""
        given = self.given(layer)
        decode.decode(
            *given, splits or self.splits, self.model[2] ** -0.5, None, None, self.order,
            shape=shape, raw=self.raw, early=True,
        )  # fmt: skip
        return given[2]

    def exact(self) -> Tensor:
        """Attention of the first layer in float64, from a cache that holds the newest keys and values."""
        heads, kv_heads, dim = self.model
        found = []
        for q, table, length in zip(self.qkv[:, :heads].double(), self.tables.long(), self.lens.tolist(), strict=True):
            token = torch.arange(length, device=self.device)
            k, v = self.caches[0][:, table[token // 16], :, token % 16].double().unbind(1)  # [tokens, sides, ...]
            scores = torch.einsum("kgd,tkd->kgt", q.view(kv_heads, -1, dim), k) * dim**-0.5
            found.append(torch.einsum("kgt,tkd->kgd", scores.softmax(-1), v).reshape(heads, dim))
        return torch.stack(found)


def replayed(works: list[Callable[[], Any]]) -> float:
    """Microseconds of each, one after the other."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(works))
    return sorted(times[2:])[5]


class Result(NamedTuple):
    us: float
    name: str
    rate: float
    error: float
    right: bool

    def __str__(self) -> str:
        return f"{self.us:6.1f} us {self.rate:.2f} {self.name} [{self.error:.0e}{'' if self.right else ' WRONG'}]"


def measure(run: Decoding, exact: Tensor, name: str, work: Callable[[int], Tensor]) -> Result:
    first = work(0)
    kept = first.clone()
    first.fill_(float("nan"))  # so that a place that is not written shows: the next result lies there
    del first
    same = torch.equal(kept, work(0))
    error = float((kept.double() - exact).norm() / exact.norm())
    layers = range(len(run.caches))
    us = replayed([lambda i=i: work(i) for i in layers] * max(1, 16 // len(layers)))  # type: ignore[misc]
    return Result(us, name, run.read / READ / us, error, same and error < TOLERANCE and not run.counters.any())


def compare(run: Decoding) -> Iterator[Result]:
    run.split()  # stores the newest keys and values
    exact = run.exact()
    yield measure(run, exact, "now", run.split)
    for one in SHAPES[next_power_of_2(run.model[2])]:
        for splits in sorted({max(1, run.splits // 2), run.splits, min(16, run.splits * 2)}):
            name = f"splits {splits} {one}"
            yield measure(run, exact, name, lambda i, n=splits, one=one: run.split(i, n, one))  # type: ignore[misc]


def compile_part(part: int, parts: int) -> None:
    """Every parts-th of the kernels into the disk cache, in a process that needs no device."""
    only_compile()
    works: list[Callable[[], object]] = []
    for model in MODELS:
        for count in (1, 2):  # several splits of the keys of each request, and one, which is another kernel
            run = Decoding(model, [17] * count, "cpu")
            each = (None, *SHAPES[next_power_of_2(model[2])])
            works += [lambda run=run, s=s: run.split(0, 1 if len(run.lens) > 1 else 2, s) for s in each]  # type: ignore[misc]
    for work in works[part::parts]:
        try:
            work()
        except Exception as error:  # told where it is measured
            print(f"not compiled: {type(error).__name__} {str(error)[:200]}", flush=True)


def main(rows_of: tuple[int, ...]) -> None:
    start = time.time()
    count = min(os.cpu_count() or 1, 20)
    with ProcessPoolExecutor(count, get_context("spawn")) as workers:
        for done in [workers.submit(compile_part, part, count) for part in range(count)]:
            done.result()
    print(torch.cuda.get_device_name(), torch.__version__, f"compiled: {time.time() - start:.0f} s", flush=True)
    best: list[str] = []
    sums: dict[tuple[tuple[int, int, int], str], float] = {}
    for model in MODELS:
        for kind in ("equal", "random"):
            for rows in rows_of:
                run = Decoding(model, lengths(kind, rows))
                now, *others = compare(run)
                title = f"{model[0]}/{model[1]}x{model[2]} {kind} {rows:3}"
                for one in (now, *sorted(others)):
                    print(f"{title}: {one}", flush=True)
                    key = model, one.name
                    sums[key] = sums.get(key, 0.0) + one.us * (rows >= 64)
                right = [one for one in others if one.right]
                best.append(f"{title}: {now} | {min(right) if right else 'none is right'}")
    print(f"\n{time.time() - start:.0f} s\nmicroseconds of all cases of 64 rows or more")
    for (model, name), us in sorted(sums.items(), key=lambda one: (one[0][0], one[1])):
        print(f"{model} {us:8.1f} {name}")
    print("", *best, sep="\n")


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or ROWS)
