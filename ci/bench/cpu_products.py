"""Products of rows and matrices on the CPU, by format: GB/s of weights at one row, GOP/s at many.

    python ci/bench/cpu_products.py                      # SmolLM2-135M's and a 1.5b model's matrices, all formats
    python ci/bench/cpu_products.py --model 1.5b --level avx512-vnni --formats bf16 int4-32 --threads 1

Formats take turns, so that what neighbours do to the machine meets all of them; each turn goes once through copies that
no cache holds. Printed are medians of turns. An operation is a multiplication or an addition. One thread's time is its
time on a core, which other processes touch little; that of several is the clock's, and wants a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from anycore.contract.check_weights import int4_weight, int8_weight
from anycore.contract.host import usable_cores
from anycore_cpu.kernels import build, quantised
from anycore_cpu.kernels.library import Kernels, PackedMatrix, load
from anycore_cpu.kernels.quantised import Layout
from anycore_cpu.probe import processor_flags

SHAPES = {
    "smollm2": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
    "1.5b": {"qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960)},
}
FORMATS = ("bf16", "w8a8", "int8-32", "int4-32", "int4-128")
Product = Callable[[Tensor], Tensor]


def products(kernels: Kernels, format: str, shape: tuple[int, int], cold: int) -> tuple[list[Product], int]:
    """Products with equal matrices in different memory, `cold` bytes of them, and the bytes of one."""
    made, generator = [], torch.Generator().manual_seed(0)
    if format == "bf16":
        dense = kernels.pack(torch.randn(*shape, generator=generator).bfloat16())
        for _ in range(-(-cold // dense.data.nbytes)):
            copy = PackedMatrix(dense.data.clone(), *shape)
            made.append(lambda x, copy=copy: kernels.linear(x, copy, None))
        return made, dense.data.nbytes
    kind, _, group = format.partition("-")
    make = int4_weight if kind == "int4" else int8_weight
    matrix = quantised.pack(kernels, make(shape, int(group or shape[1]), torch.bfloat16, generator))
    for _ in range(-(-cold // matrix.data.nbytes)):
        data, layout = matrix.data.clone(), Layout.from_buffer_copy(matrix.layout)
        layout.packed = data.data_ptr()
        copy = replace(matrix, data=data, layout=layout)
        made.append(lambda x, copy=copy: quantised.linear(kernels, x, copy, None))
    return made, matrix.data.nbytes


def seconds(calls: list[Product], x: Tensor, clock: Callable[[], float]) -> float:
    """Of one product, over as many as take a moment."""
    started = clock()
    done = 0
    for call in calls:
        call(x)
        done += 1
        if done >= 4 and clock() - started > 1:
            break
    return (clock() - started) / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="*", default=list(SHAPES))
    parser.add_argument("--formats", choices=FORMATS, nargs="*", default=list(FORMATS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--level", default="", help="of the kernels; default: the best this machine runs")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cold", type=int, default=400, help="MB of copies of each matrix: more than the caches hold")
    options = parser.parse_args()
    kernels = load(build.choose(processor_flags(), {build.VARIABLE: options.level}), options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"level {kernels.level}, {options.threads} threads; GB/s at 1 row, GOP/s at more; MB of a matrix in brackets")
    for model in options.model:
        for name, shape in SHAPES[model].items():
            calls, size = {}, {}
            for format in options.formats:
                calls[format], size[format] = products(kernels, format, shape, options.cold * 1_000_000)
            for rows in options.rows:
                x = torch.randn(rows, shape[1]).bfloat16()
                taken: dict[str, list[float]] = {format: [] for format in calls}
                for _ in range(options.turns):
                    for format, some in calls.items():
                        taken[format].append(seconds(some, x, clock))
                line = f"{model:8} {name:8} {rows:4} rows"
                for format, times in taken.items():
                    work = size[format] if rows == 1 else 2 * rows * shape[0] * shape[1]
                    line += f"   {format} {work / statistics.median(times) / 1e9:7.1f} ({size[format] / 1e6:.1f})"
                print(line, flush=True)


if __name__ == "__main__":
    main()
