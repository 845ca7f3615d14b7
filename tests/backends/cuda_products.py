"""Compiles products for compute capability 9.0 on a machine without a GPU: shapes in use, and what they are made of.

Run as a program of its own (Triton must not interpret). Prints as JSON, by shape: matrix instructions of Hopper, bytes
of stack (registers did not suffice), shared memory, and whether it waits for the kernel ahead before it touches memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from cuda_compiled import Driver, waits
from triton.compiler.compiler import CompiledKernel

from anycore_cuda.kernels import small_products
from anycore_cuda.kernels.products import Shape, product, variant_of

IN_USE = [
    (outs, width, gated, rows, variant_of(outs, width, rows, gated))
    for outs, width, gated in ((3584, 18944, False), (37888, 3584, True))
    for rows in (8, 32, 40, 64)
]
OTHERS = [
    (3584, 3584, False, 144, Shape(256, 64, 132, 8, 4)),
    (37888, 3584, True, 144, Shape(128, 64, 132, 8, 4, ahead=4)),
    (1152, 896, False, 32, Shape(64, 64, 126, 4, 4, last=True, ahead=2)),
]
"""Of more rows, which are held in two parts, and one whose programs both ask ahead and join."""

SMALL = [
    ("whole", 1152, 896, (64, 128, 256)),
    ("gated", 9728, 896, (64, 128)),
    ("gated", 6144, 1024, (64, 128)),
    ("parts", 896, 4864, (32, 64, 128, 256)),
]
"""What becomes of the product, the matrix, rows of x."""


def multiply_small(kind: str, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Launch a small product; return its shape."""
    outs, width = weight.shape
    if kind == "parts":
        shape = small_products.parts_shape_of(outs, width, len(x))
        assert shape is not None
        small_products.parts(x, weight, shape, early=True)
        return shape
    shape = small_products.shape_of(outs, width, len(x), kind == "gated")
    assert shape is not None
    bias = torch.empty(len(weight), dtype=x.dtype) if kind == "whole" else None
    small_products.product(x, weight, shape, bias, "silu" if kind == "gated" else None, early=True)
    return shape


def stack_of(kernel: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1])


def facts(kernel: Any) -> dict[str, Any]:
    return {
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"), "stack": stack_of(kernel),
        "shared": kernel.metadata.shared, "waits": waits(kernel),
    }  # fmt: skip


def main() -> None:
    made: list[Any] = []

    def leave_out(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = "none", 0, lambda *arguments: None
        made.append(kernel)

    triton.runtime.driver.set_active(Driver())
    CompiledKernel._init_handles = leave_out
    counters = torch.zeros(1 << 12, dtype=torch.int32)
    told: dict[str, dict[str, Any]] = {}
    for outs, width, gated, rows, shape in (*IN_USE, *OTHERS):
        assert shape is not None
        made.clear()
        x = torch.empty(rows, width, dtype=torch.bfloat16)
        weight = torch.empty(outs, width, dtype=torch.bfloat16)
        product(x, weight, shape, counters, None, "silu" if gated else None, early=True)
        told |= {f"{outs}x{width} {rows} {tuple(shape)}": facts(k) for k in made if k.name == "_product"}
    for kind, outs, width, counts in SMALL:
        for rows in counts:
            made.clear()
            x, weight = (torch.empty(n, width, dtype=torch.bfloat16) for n in (rows, outs))
            shape = multiply_small(kind, x, weight)
            told |= {f"{kind} {outs}x{width} {rows} {tuple(shape)}": facts(kernel) for kernel in made}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
