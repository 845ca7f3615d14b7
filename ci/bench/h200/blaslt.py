"""Every algorithm that cuBLASLt offers for a product, rather than the one it would take: what the library can do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

COMPUTE_FLOAT32, REAL_FLOAT32, REAL_BFLOAT16 = 68, 0, 14
TRANSPOSE_A, TRANSPOSED = 3, 1
MAX_WORKSPACE = 1
WORKSPACE = 128 << 20
ATTRIBUTES: dict[str, tuple[int, type[Any]]] = {
    "id": (0, c_int32), "tile": (1, c_uint32), "split": (2, c_int32), "scheme": (3, c_uint32),
    "stages": (6, c_uint32), "inner": (7, c_uint16), "cluster": (8, c_uint16),
}  # fmt: skip
"""What tells algorithms apart: names of ours, numbers of cublasLtMatmulAlgoConfigAttributes_t."""


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int32), ("waves", c_float),
        ("reserved", c_int32 * 4),
    )  # fmt: skip


class Library:
    def __init__(self) -> None:
        torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda"))  # torch loads the library
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
        self.calls = ctypes.CDLL(path)
        self.handle = c_void_p()
        self.call("Create", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.calls, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} returned {status}")

    def offers(self, x: Tensor, outs: int, most: int, dtype: torch.dtype) -> list[tuple[str, Callable[..., Tensor]]]:
        """Algorithms by name for bfloat16 x [R, I] times [O, I] → [R, O] of a type, each a function of (x, weight)."""
        rows, width = x.shape
        kind = REAL_FLOAT32 if dtype == torch.float32 else REAL_BFLOAT16
        product, preference, a, b, d = (c_void_p() for _ in range(5))
        self.call("MatmulDescCreate", byref(product), COMPUTE_FLOAT32, REAL_FLOAT32)
        self.call("MatmulDescSetAttribute", product, TRANSPOSE_A, byref(c_int32(TRANSPOSED)), c_size_t(4))
        # Its matrices are stored by columns: what we call [O, I] is [I, O] there.
        for layout, number, sizes in (
            (a, REAL_BFLOAT16, (width, outs)), (b, REAL_BFLOAT16, (width, rows)), (d, kind, (outs, rows)),
        ):  # fmt: skip
            first, second = sizes  # the first is the distance of columns, too
            self.call("MatrixLayoutCreate", byref(layout), number, c_uint64(first), c_uint64(second), c_int64(first))
        self.call("MatmulPreferenceCreate", byref(preference))
        limit = c_size_t(WORKSPACE)
        self.call("MatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, byref(limit), c_size_t(8))
        found, count = (Found * most)(), c_int32()
        self.call(
            "MatmulAlgoGetHeuristic", self.handle, product, a, b, d, d, preference, most, byref(found), byref(count)
        )

        def runner(one: Found) -> Callable[..., Tensor]:
            def run(x: Tensor, weight: Tensor) -> Tensor:
                out = torch.empty(rows, outs, dtype=dtype, device="cuda")
                self.call(
                    "Matmul", self.handle, product, byref(c_float(1)), c_void_p(weight.data_ptr()), a,
                    c_void_p(x.data_ptr()), b, byref(c_float(0)), c_void_p(out.data_ptr()), d,
                    c_void_p(out.data_ptr()), d, byref(one.algorithm), c_void_p(self.workspace.data_ptr()),
                    c_size_t(WORKSPACE), c_void_p(torch.cuda.current_stream().cuda_stream),
                )  # fmt: skip
                return out

            return run

        return [(f"Lt{i} {self.described(found[i])}", runner(found[i])) for i in range(count.value)]

    def described(self, one: Found) -> str:
        words = []
        for name, (number, kind) in ATTRIBUTES.items():
            value, written = kind(), c_size_t()
            failed = self.calls.cublasLtMatmulAlgoConfigGetAttribute(
                byref(one.algorithm), number, byref(value), c_size_t(sizeof(value)), byref(written)
            )
            words.append(f"{name}={'?' if failed else value.value}")
        return " ".join(words)
