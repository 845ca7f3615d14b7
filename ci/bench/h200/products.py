"""Products of decoding a batch: what cuBLAS takes by rows, what else it offers, and what kernels of our own take.

PYTHONPATH=framework:backends python ci/bench/h200/products.py [ROWS ...] > products.txt

Matrices take turns, so that none is found in the L2 cache. A result: the share of the read limit, microseconds, what,
and the error against float64, with WRONG where that is too much or where a second run gave other numbers. Last, tables
of the best, and what they would change in a decode step of qwen2.5-7b.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ahead import only_compile
from blaslt import Library
from torch import Tensor

from anycore_cuda.kernels.gated import gated
from anycore_cuda.kernels.products import PROCESSORS, Shape, parts_of, product

Work = Callable[[Tensor, Tensor], Tensor]
READ = 4.42e6
"""Bytes a microsecond."""
MEMORY = 227 << 10
"""Shared memory of a processor, for programs."""
COLD = 300 << 20
ROWS = (8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
TOLERANCE = 8e-3
OFFERS = 16
SECONDS = 400
"""After so many nothing more is measured."""


@dataclass(frozen=True)
class Case:
    """A matrix of qwen2.5-7b, and how often a step multiplies with it."""

    name: str
    outs: int
    width: int
    times: int = 28
    gate: str | None = None
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("qkv", 4608, 3584),
    Case("out", 3584, 3584),
    Case("gate_up", 2 * 18944, 3584, times=0),  # counted with its gate
    Case("gated", 2 * 18944, 3584, gate="silu"),
    Case("down", 3584, 18944),
    Case("head", 152064, 3584, times=1, dtype=torch.float32),
)


class Result(NamedTuple):
    us: float
    name: str
    error: float
    same: bool

    def __str__(self) -> str:
        fine = self.error < TOLERANCE and self.same
        return f"{self.us:.1f} us {self.name} [{self.error:.1e}{'' if fine else ' WRONG'}]"


def shapes(case: Case, rows: int) -> Iterator[Shape]:
    """What fits: sums within registers, three stages or more within shared memory, one or two programs a processor."""
    held, sides = sum(parts_of(rows)), 1 if case.gate is None else 2
    for outs, columns, warps, each in (
        (256, 64, 8, 1), (128, 64, 8, 1), (128, 128, 8, 1), (128, 64, 4, 2), (64, 64, 4, 2), (64, 128, 4, 2),
    ):  # fmt: skip
        stages = min(6, (MEMORY // each - 2048) // ((outs + held) * columns * 2))
        if stages < 3 or outs * held > 192 * 32 * warps or outs < 64 * sides:
            continue
        shape = Shape(outs // sides, columns, PROCESSORS * each, warps, stages)
        yield shape
        if each == 1 and columns == 64 and case.name != "head":
            yield shape._replace(ahead=4)
        tiles = -(-case.outs // outs)
        if tiles < PROCESSORS and outs == 128:
            even = shape._replace(programs=shape.programs // tiles * tiles)  # every tile to as many programs
            yield from (shape._replace(last=True), even, even._replace(last=True))


def ours(shape: Shape, case: Case, counters: Tensor) -> Work:
    return lambda x, weight: product(x, weight, shape, counters, None, case.gate, case.dtype, early=True)


def compile_part(rows_of: tuple[int, ...], part: int, parts: int) -> None:
    """Every parts-th of the kernels into the disk cache, in a process that needs no device."""
    only_compile()
    different = {}
    for rows in rows_of:
        for case in CASES:
            for shape in shapes(case, rows):
                tiles = -(-case.outs // shape.outs // (1 if case.gate is None else 2))
                kind = parts_of(rows), shape._replace(programs=0), case.gate, case.dtype, tiles % shape.programs > 0
                different.setdefault(kind, (rows, case, shape))
    for rows, case, shape in list(different.values())[part::parts]:
        x = torch.empty(rows, case.width, dtype=torch.bfloat16)
        weight = torch.empty(case.outs, case.width, dtype=torch.bfloat16)
        ours(shape, case, torch.zeros(1 << 12, dtype=torch.int32))(x, weight)


class Bench:
    """A case's matrices and rows, and the exact products."""

    def __init__(self, case: Case, pool: Any) -> None:
        bf16 = {"device": "cuda", "dtype": torch.bfloat16}
        self.case, self.pool = case, pool
        self.bytes = case.outs * case.width * 2
        self.x = torch.randn(max(ROWS), case.width, **bf16)
        count = max(2, -(-COLD // self.bytes))
        self.weights = [torch.randn(case.outs, case.width, **bf16).mul_(case.width**-0.5) for _ in range(count)]
        self.exact = self.x.double() @ self.weights[0].double().T
        if case.gate is not None:
            half = case.outs // 2
            self.exact = F.silu(self.exact[:, :half]) * self.exact[:, half:]

    def measure(self, name: str, work: Work, rows: int, turned: bool = False) -> Result | None:
        try:
            return self._measure(name, work, rows, turned)
        except Exception as error:  # does not fit, or is not supported
            print(f"{self.case.name} {rows} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return None

    def _measure(self, name: str, work: Work, rows: int, turned: bool) -> Result:
        x = self.x[:rows]
        found = work(x, self.weights[0])
        first = found.clone()
        found.fill_(float("nan"))  # so that a place that is not written shows: the next result lies there
        del found
        second = work(x, self.weights[0])
        exact = self.exact[:rows]
        got = (first.T if turned else first).double()
        error = float((got - exact).norm() / exact.norm())
        same = torch.equal(first, second)
        del first, second, got
        works = -(-(48 if self.bytes < COLD // 4 else 8) // len(self.weights)) * self.weights
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool)
        try:
            for weight in works:
                work(x, weight)
        finally:
            graph.capture_end()
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / len(works))
        return Result(statistics.median(times[1:]), name, error, same)

    def libraries(self, library: Library, rows: int) -> tuple[Result | None, list[Result]]:
        """What the backend takes now, and what cuBLAS has otherwise."""
        case = self.case

        def linear(x: Tensor, weight: Tensor) -> Tensor:
            if case.dtype == torch.float32:
                return torch.mm(x, weight.T, out_dtype=torch.float32)
            out = F.linear(x, weight)
            return out if case.gate is None else gated(out, case.gate, True)

        now = self.measure("linear", linear, rows)
        others: list[Result | None] = []
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        others.append(self.measure("linear by cuBLASLt", linear, rows))
        torch.backends.cuda.preferred_blas_library(before)
        if case.gate is None:
            if case.dtype == torch.bfloat16:
                turn: Work = lambda x, weight: torch.mm(weight, x.T)  # noqa: E731
                others.append(self.measure("turned", turn, rows, turned=True))
            try:
                offers = library.offers(self.x[:rows], case.outs, OFFERS, case.dtype)
            except RuntimeError as error:
                print(f"{case.name} {rows}: {error}", flush=True)
                offers = []
            others += [self.measure(name, work, rows) for name, work in offers]
        return now, [one for one in others if one]


def tell(bench: Bench, rows: int, results: list[Result], most: int) -> None:
    for one in sorted(results)[:most]:
        print(f"{bench.case.name} {rows}: {bench.bytes / READ / one.us:.2f} {one}", flush=True)


def main(rows_of: tuple[int, ...]) -> None:
    start = time.time()
    count = os.cpu_count() or 1
    workers = ProcessPoolExecutor(count, get_context("spawn"))
    compiled = [workers.submit(compile_part, rows_of, part, count) for part in range(count)]

    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are not captured on the first one
    keeper = torch.cuda.CUDAGraph()  # of the memory that later graphs take in turn
    keeper.capture_begin()
    torch.zeros(1, device="cuda")
    keeper.capture_end()
    pool = keeper.pool()
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda, flush=True)
    counters = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    benches = [Bench(case, pool) for case in CASES]
    library = Library()
    now: dict[tuple[str, int], Result | None] = {}
    best: dict[tuple[str, int, str], Result] = {}

    def keep(bench: Bench, rows: int, who: str, results: list[Result]) -> None:
        right = [one for one in results if one.error < TOLERANCE and one.same]
        if right:
            best[bench.case.name, rows, who] = min(right)

    for bench in benches:
        for rows in rows_of:
            found, others = bench.libraries(library, rows)
            now[bench.case.name, rows] = found
            keep(bench, rows, "cuBLAS", others)
            tell(bench, rows, others if found is None else [*others, found], 5)
    print(f"cuBLAS measured: {time.time() - start:.0f} s", flush=True)
    for one in compiled:
        if failure := one.exception():
            print(f"not compiled: {failure}", flush=True)
    print(f"kernels compiled: {time.time() - start:.0f} s", flush=True)
    workers.shutdown()
    for bench in benches:
        for rows in rows_of:
            tried = [
                bench.measure(str(tuple(s)), ours(s, bench.case, counters), rows) for s in shapes(bench.case, rows)
            ]
            results = [one for one in tried if one]
            keep(bench, rows, "ours", results)
            tell(bench, rows, results, 9)
    print(f"counters left: {int(counters.abs().sum())}; {time.time() - start:.0f} s", flush=True)
    table(rows_of, now, best)


def table(
    rows_of: tuple[int, ...], now: dict[tuple[str, int], Result | None], best: dict[tuple[str, int, str], Result]
) -> None:
    """By rows: now, the best of cuBLAS, the best of ours; and what the faster of these saves of a step."""
    saved = dict.fromkeys(rows_of, 0.0)
    for case in CASES:
        print(f"\n{case.name} {case.outs}x{case.width}: limit {case.outs * case.width * 2 / READ:.1f} us")
        for rows in rows_of:
            today, theirs, own = now[case.name, rows], *(best.get((case.name, rows, w)) for w in ("cuBLAS", "ours"))
            if today:
                saved[rows] += case.times * (today.us - min(one.us for one in (today, theirs, own) if one))
            print(f"{rows:4} now {today} | cuBLAS {theirs} | ours {own}")
    print("\nmilliseconds saved of a step, by rows:", {rows: round(us / 1e3, 2) for rows, us in saved.items()})


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or ROWS)
