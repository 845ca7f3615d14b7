"""Quantised products on one card: right against float64, then how long by kernel and shape; prints tables.

PYTHONPATH=framework:backends:tests:ci/bench/h200 python ci/bench/h200/quantised.py [check] [time] [tune]

Matrices are those of a layer of qwen2.5-7b. Several copies of each take turns, more than the L2 cache holds. All
kernels are compiled side by side before any is timed. SECONDS (170) is when measuring ends, wherever it is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product as product_of
from typing import Any

import torch
import triton
from measure import replayed
from torch import Tensor

from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight
from anycore_cuda.backend import CudaBackend
from anycore_cuda.kernels import quantised_linear
from anycore_cuda.kernels.int4 import nibble_matvec
from anycore_cuda.kernels.int8 import byte_matvec
from anycore_cuda.kernels.launch import launch
from anycore_cuda.kernels.quantised import Packed, pack
from anycore_cuda.kernels.quantised_dense import WORKSPACE, dense_product, dense_rows
from anycore_cuda.kernels.quantised_linear import TILED_ROWS
from anycore_cuda.kernels.quantised_products import _join, product
from anycore_cuda.kernels.quantised_rows import fix, round_rows
from anycore_cuda.kernels.quantised_shapes import SHARED, Shape, shape_of, stage_bytes
from anycore_cuda.kernels.quantised_wide import WIDE_ROWS, fits

STARTED = time.perf_counter()
SECONDS = float(os.environ.get("SECONDS", "170"))
BF16 = torch.bfloat16
LAYER = {"qkv": (4608, 3584), "out": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
ROWS = (1, 8, 32, 64, 96, 144, 192, 256, 2048)
FOUR = "int4 128"
FORMATS = ("int8", "fp8", FOUR, "int4 32", "int8 32")
READ, PRODUCT = 4.42e12, {"bf16": 797e12, "int8": 1590e12, "e4m3": 1590e12}
COLD = 250 << 20
"""Bytes of all copies of a matrix, at least."""


def weight(name: str, shape: tuple[int, int], seed: int = 0) -> QuantisedWeight:
    """Random numbers; results of rows near 1 are near 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kind, _, group = name.partition(" ")
    size = int(group) if group else shape[1]
    groups = -(-shape[1] // size)
    draw = partial(torch.rand, generator=generator, device="cuda")
    scale = (0.5 + draw(shape[0], groups)) * shape[1] ** -0.5
    if kind == "fp8":
        numbers = torch.randn(shape, generator=generator, device="cuda").mul_(30).to(torch.float8_e4m3fn)
        return Fp8Weight(numbers, scale[:, 0] / 30, BF16)
    if kind == "int4":
        data = torch.randint(0, 16, shape, generator=generator, device="cuda", dtype=torch.uint8)
        return Int4Weight(data, scale / 4.6, 4 + 8 * draw(shape[0], groups), size, BF16)
    data = torch.randint(-127, 128, shape, generator=generator, device="cuda", dtype=torch.int8)
    return Int8Weight(data, scale / 73, size, BF16)


def exact_rows(given: QuantisedWeight) -> Tensor:
    """[O, I] float64, by the definition."""
    if isinstance(given, Fp8Weight):
        return given.data.double() * given.scale.double()[:, None]
    group = torch.arange(given.shape[1], device="cuda") // given.group
    zero = given.zero.double()[:, group] if isinstance(given, Int4Weight) else 0.0
    return (given.data.double() - zero) * given.scale.double()[:, group]


def as_rounded(x: Tensor, packed: Packed) -> Tensor:
    """What the kernels make of rows, in float64; ties may go either way, so it is held to half a step, not to torch."""
    if not packed.rounds:
        return x.double()
    numbers, scale, _ = round_rows(x, packed.kind)
    made, unit = numbers.double() * scale.double()[:, None], scale.double()[:, None]
    step = unit if packed.kind == "int8" else (made.abs() / 8).clamp_min(unit * 2**-9)
    if not bool(((made - x.double()).abs() <= step * 0.501).all()):
        print(
            f"NOT NEAREST: {packed.kind} {tuple(x.shape)}: {float(((made - x.double()).abs() / step).max()):.3f} steps"
        )
    return made


def check(backend: CudaBackend) -> None:
    """Every format, layer shapes and odd ones, all counts of rows: norm of the error over the norm of the result."""
    ops = backend.ops
    shapes = {**LAYER, "odd": (70, 1100), "thin": (48, 96), "smol": (1536, 576)}
    todo: list[tuple[str, str, int]] = [(s, f, r) for s in shapes for f in FORMATS for r in ROWS]
    made: dict[tuple[str, str], Any] = {}

    def run(where: str, name: str, rows: int) -> tuple[Tensor, Tensor, bool]:
        if (where, name) not in made:
            given = weight(name, shapes[where])
            made.clear()
            made[where, name] = pack(given, ops.chip.e4m3), exact_rows(given)
        packed, exact = made[where, name]
        x = torch.randn(rows, shapes[where][1], device="cuda", dtype=BF16)
        bias = torch.randn(shapes[where][0], device="cuda", dtype=BF16)
        out = ops.linear(x, packed, bias)
        return out, as_rounded(x, packed) @ exact.T + bias.double(), torch.equal(out, ops.linear(x, packed, bias))

    small = [one for one in todo if one[0] != "gate_up" and one[0] != "down"]
    with launch.compiling(backend.device):
        for one in todo:
            packed = _meta(one[1], shapes[one[0]], ops.chip.e4m3)
            ops.linear(
                torch.zeros(one[2], shapes[one[0]][1], device="cuda", dtype=BF16), packed,
                torch.zeros(shapes[one[0]][0], device="cuda", dtype=BF16),
            )  # fmt: skip
    print(f"compiled after {time.perf_counter() - STARTED:.0f} s", flush=True)
    worst: dict[tuple[str, int], float] = {}
    large = [
        (s, f, r) for s, f, r in todo if s in ("gate_up", "down") and r in ((1, 32, 144) if f != FOUR else ROWS[:-1])
    ]
    for where, name, rows in small + large:
        out, exact, repeated = run(where, name, rows)
        error = float((out.double() - exact).norm() / exact.norm())
        worst[name, rows] = max(worst.get((name, rows), 0.0), error)
        if not repeated:
            print(f"NOT REPEATED: {name} {where} {rows}")
        if not error < 6e-3:
            print(f"WRONG: {name} {where} {shapes[where]} {rows} rows: {error:.2e}", flush=True)
    table = weight("int4 32", (999, 576)), weight("int8", (999, 576)), weight("fp8", (999, 576))
    ids = torch.randint(0, 999, (50,), device="cuda")
    for given in table:
        got, exact = dense_rows(pack(given, True), ids=ids).double(), exact_rows(given)[ids]
        print(f"table {type(given).__name__}: {float((got - exact).norm() / exact.norm()):.1e}")
    for name in FORMATS:
        print(f"{name:9}" + "".join(f" {rows}: {worst.get((name, rows), -1):.1e}" for rows in ROWS), flush=True)


def _meta(name: str, shape: tuple[int, int], e4m3: bool) -> Packed:
    """A matrix of no particular numbers, to compile for."""
    kind, _, group = name.partition(" ")
    outputs, columns = shape
    groups = -(-columns // int(group or columns))
    empty = partial(torch.empty, device="cuda")
    if kind == "int4":
        words = -(-columns // 32) * 4
        data, scale = empty(outputs, words, dtype=torch.int32), empty(outputs, groups, 2, dtype=torch.float16)
        return Packed("int4", data, scale, columns, int(group), 1.0, BF16, False)
    data = empty(outputs, columns, dtype=torch.int8 if kind == "int8" else torch.uint8)
    if group:
        return Packed("int8", data, empty(outputs, groups, dtype=torch.float16), columns, int(group), 1.0, BF16, False)
    rounds = kind == "int8" or e4m3
    return Packed("int8" if kind == "int8" else "e4m3", data, empty(outputs), columns, 0, 1.0, BF16, rounds)


@dataclass
class Job:
    """One way to compute one product, and the time it took."""

    where: str
    rows: int
    name: str
    way: str
    work: Callable[[Any], Any]
    copies: list[Any]
    tried: bool = False  # a shape that is not in use
    us: float = float("nan")

    def measure(self) -> None:
        try:
            self.us = replayed(lambda: [self.work(copy) for copy in self.copies], 1) / len(self.copies)
        except Exception as error:  # a shape that does not fit, or what a library lacks
            print(self.where, self.rows, self.name, self.way, type(error).__name__, str(error)[:150].replace("\n", " "))

    def line(self, dense: float) -> str:
        outputs, columns = LAYER[self.where]
        held = self.copies[0].nbytes
        kind = "bf16" if isinstance(self.copies[0], Tensor) or not self.copies[0].rounds else self.copies[0].kind
        read = held / READ / self.us * 1e6
        flops = 2.0 * self.rows * outputs * columns / PRODUCT[kind] / self.us * 1e6
        return (
            f"{self.where:8}{self.rows:5} {self.name:9} {self.us:8.1f} us  {read:4.0%} of reading {flops:4.0%} of "
            f"product {dense / self.us:5.2f} x bf16  {self.way}"
        )


def copies_of(name: str, shape: tuple[int, int]) -> list[Any]:
    first = torch.randn(shape, device="cuda", dtype=BF16) if name == "bf16" else pack(weight(name, shape), True)
    count = max(2, -(-COLD // first.nbytes))
    if isinstance(first, Tensor):
        return [first, *(first.clone() for _ in range(count - 1))]
    return [first, *(replace(first, data=first.data.clone(), scale=first.scale.clone()) for _ in range(count - 1))]


def through_int_mm(numbers: Tensor, scale: Tensor, packed: Packed) -> Tensor:
    """cuBLAS's product of int8, then scales."""
    rows, outputs = len(numbers), packed.shape[0]
    whole = torch._int_mm(numbers, packed.data.t())
    out = torch.empty(rows, outputs, device="cuda", dtype=BF16)
    launch(
        _join, (rows, triton.cdiv(outputs, 1024)), whole, out, packed.scale, scale, scale, rows, 0, 1.0,
        OUTPUTS=outputs, SPLITS=1, SCALED=True, ROUNDS=True, BIAS=False, BLOCK=1024, EARLY=False, num_warps=4,
    )  # fmt: skip
    return out


def jobs(backend: CudaBackend, where: str, name: str, counts: tuple[int, ...], tune: bool) -> Iterator[Job]:
    shape = LAYER[where]
    copies = copies_of(name, shape)
    norm = torch.ones(shape[1], device="cuda")
    chip = backend.ops.chip
    for rows in counts:
        x = torch.randn(rows, shape[1], device="cuda", dtype=BF16)
        job = partial(Job, where, rows, name, copies=copies)
        if name == "bf16":
            yield job("as it is", partial(backend.ops.linear, x))
            continue
        yield job("as it is", lambda w, x=x: quantised_linear.linear(x, w, None, chip))
        first = copies[0]
        if rows == 1:
            alone = _alone(first, x, chip)
            yield job("product alone", partial(alone, None))
            if where in ("qkv", "gate_up"):
                more = (norm, 1e-6), (None, "silu" if where == "gate_up" else None, chip)
                added = torch.randn_like(x)
                yield job(
                    "with norm", lambda w, x=x, a=added, m=more: quantised_linear.norm_linear(x, a, *m[0], w, *m[1])
                )
            for each in VECTORS["int4" if first.kind == "int4" else "byte"] if tune else ():
                yield job(f"{each}", partial(alone, each), tried=True)
            continue
        if first.rounds:
            numbers, scale, _ = round_rows(x, first.kind)
            yield job("rounding alone", lambda w, x=x: round_rows(x, w.kind, early=chip.early))
            mine = shape_of(first, rows, chip.processors)
            tiles = partial(_tiles, numbers, scale, chip.processors)
            yield job(f"product alone, tiles {_short(mine)}", partial(tiles, mine))
            if rows > 16 and first.kind == "int8":
                yield job("product alone, _int_mm", lambda w, n=numbers, s=scale: through_int_mm(n, s, w))
            if first.kind == "e4m3":
                library = replace(chip, e4m3=True, scaled=True)
                scaled = partial(_library, numbers, scale, library)
                yield job("product alone, _scaled_mm", scaled)
        else:
            if rows > TILED_ROWS or first.kind == "int8":
                yield job("dense, then cuBLAS", lambda w, x=x: dense_product(x, w, BF16))
                yield job("dense alone", lambda w: dense_rows(w, 0, min(w.shape[0], WORKSPACE // (2 * w.columns))))
            if first.kind == "int8" or (TILED_ROWS < rows <= WIDE_ROWS and fits(x, first)):
                continue  # as it is
            mine = shape_of(first, rows, chip.processors)
            tiles = partial(_tiles, x, None, chip.processors)
            yield job(f"tiles {_short(mine)}", partial(tiles, mine))
        for other in _shapes(first, rows, mine) if tune and rows <= 256 else ():
            yield job(f"tiles {_short(other)}", partial(tiles, other), tried=True)


VECTORS = {
    "int4": (
        *((4, 64, 2, n) for n in (6, 8, 10, 12, 14)),
        *((4, 128, 4, n) for n in (3, 4, 5, 6, 7)),
        *((4, 32, 1, n) for n in (12, 16, 20, 24, 28)),
        *((8, 16, 1, n) for n in (12, 16, 20, 24)),
        *((4, 16, 1, n) for n in (16, 24, 32)),
        *((8, 32, 2, n) for n in (6, 8, 10)),
        *((2, 128, 4, n) for n in (6, 8)),
        (8, 64, 4, 4),
        (8, 32, 1, 16),
    ),
    "byte": ((4, 512, 1), (4, 1024, 2), (4, 2048, 4), (8, 1024, 2), (8, 2048, 4), (2, 2048, 4), (2, 4096, 8)),
}


def _shapes(packed: Packed, rows: int, mine: Shape) -> Iterator[Shape]:
    """Others than ours: tiles, how many rows share one, stages, splits."""
    most = min(256, max(16, triton.next_power_of_2(rows)))
    stages = (3, 4) if packed.rounds else (2, 3)
    for tile, each, depth in product_of((64, 128), sorted({most, min(128, most), min(64, most)}), stages):
        for splits in sorted({mine.splits, max(1, mine.splits // 2), min(16, 2 * mine.splits)}):
            found = Shape(tile, each, mine.columns, 8 if tile * each >= 128 * 128 else 4, depth, splits)
            if found != mine and (depth - 1) * stage_bytes(packed, tile, each, mine.columns) <= SHARED:
                yield found


def _short(shape: Shape) -> str:
    return "outputs rows turn warps stages splits more whole " + " ".join(map(str, astuple(shape)))


def _alone(packed: Packed, x: Tensor, chip: quantised_linear.Chip) -> Callable[[Any, Packed], Tensor]:
    """One row's product, by shape, without what prepares the row."""
    if packed.kind == "int4":
        fixed, _ = fix(x, packed)
        return lambda shape, w: nibble_matvec(fixed, w, None, BF16, chip.processors, shape=shape, early=chip.early)
    numbers, scale = round_rows(x, packed.kind)[:2] if packed.rounds else (x, None)
    return lambda shape, w: byte_matvec(numbers, w, scale, None, BF16, shape=shape, early=chip.early)


def _tiles(x: Tensor, scale: Tensor | None, processors: int, shape: Shape, packed: Packed) -> Tensor:
    return product(x, packed, scale, None, BF16, processors, shape)


def _library(x: Tensor, scale: Tensor, chip: Any, packed: Packed) -> Tensor:
    other = packed.data.view(torch.float8_e4m3fn).t()
    return torch._scaled_mm(
        x, other, scale_a=scale[:, None], scale_b=packed.scale[None], out_dtype=BF16, use_fast_accum=True
    )


def timed(backend: CudaBackend, counts: tuple[int, ...], tune: bool, names: tuple[str, ...]) -> None:
    for where in LAYER:
        # One layer shape at a time: its matrices in every format, then all ways of multiplying them.
        found = [job for name in ("bf16", *names) for job in jobs(backend, where, name, counts, tune)]
        with launch.compiling(backend.device):
            for job in found:
                with suppress(Exception):  # it is said when it is measured
                    job.work(job.copies[0])
        best: dict[tuple[int, str], list[Job]] = {}
        for job in found:
            if time.perf_counter() - STARTED > SECONDS:
                print("out of time", where, job.rows, job.name)
                return
            job.measure()
            best.setdefault((job.rows, job.name), []).append(job)
        dense = {job.rows: job.us for job in found if job.name == "bf16"}
        for (rows, _), same in best.items():
            others = sorted((job for job in same if job.tried and job.us == job.us), key=lambda job: job.us)
            for job in (*(job for job in same if not job.tried), *others[:3]):
                print(job.line(dense[rows]), flush=True)
        print(f"-- {where}: after {time.perf_counter() - STARTED:.0f} s", flush=True)
        del found, best
        torch.cuda.empty_cache()


def main() -> None:
    wanted = sys.argv[1:] or ["check", "time"]
    with torch.inference_mode():
        backend = CudaBackend(0)
        if "check" in wanted:
            check(backend)
        if "time" in wanted:
            timed(backend, ROWS, False, FORMATS)
        if "tune" in wanted:
            timed(backend, (1, 8, 32, 144, 256), True, FORMATS[:3])


if __name__ == "__main__":
    main()
