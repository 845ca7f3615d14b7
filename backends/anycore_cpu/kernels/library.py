"""The kernels as functions of tensors: ctypes on their addresses, nothing of torch's own interface."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anycore.contract.ops import HeadNorms
from anycore.contract.rounded import RoundedCache
from anycore.errors import ConfigError
from anycore_cpu.kernels import build, quantised
from anycore_cpu.kernels.attention import DTYPES, Arguments, KernelPlan, address, arguments, expect
from anycore_cpu.kernels.recording import Arena, Call, OnlyKernels, Recorder
from anycore_cpu.kernels.shelf import Shelf

log = logging.getLogger(__name__)

ADDRESS, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[int]] | None, tuple[type, ...]]] = {
    "anycore_prepare": (INT, ()),
    "anycore_threads": (None, (INT,)),
    "anycore_packed_size": (LONG, (LONG, LONG, INT)),
    "anycore_pack": (None, (ADDRESS, LONG, LONG, LONG, INT, ADDRESS)),
    "anycore_attention": (None, (ctypes.POINTER(Arguments),)),
    "anycore_norm": (None, (*[ADDRESS] * 4, FLOAT, LONG, LONG, INT, INT, ADDRESS, ADDRESS)),
    "anycore_activation": (None, (ADDRESS, LONG, LONG, INT, INT, INT, ADDRESS)),
    "anycore_place": (None, (ADDRESS, LONG, LONG, LONG, ADDRESS)),
    "anycore_linear": (None, (ADDRESS, LONG, LONG, ADDRESS, LONG, LONG, ADDRESS, ADDRESS, INT, INT)),
    "anycore_gather": (None, (*[ADDRESS, ADDRESS, LONG] * 3, LONG, LONG, FLOAT, INT, ADDRESS)),
    "anycore_angles": (None, (ADDRESS, ADDRESS, FLOAT, LONG, LONG, ADDRESS, ADDRESS)),
    "anycore_pool": (None, (ADDRESS, ADDRESS, LONG, LONG, INT, INT, ADDRESS)),
    "anycore_mask": (None, (ADDRESS, LONG, ADDRESS, ADDRESS, LONG)),
    "anycore_penalise": (None, (ADDRESS, LONG, LONG, ADDRESS, ADDRESS, LONG, *[ADDRESS] * 4, LONG)),
    "anycore_add": (None, (ADDRESS, LONG, LONG, *[ADDRESS] * 3, LONG)),
    "anycore_ban": (None, (ADDRESS, LONG, LONG, *[ADDRESS] * 2, LONG)),
    "anycore_report": (None, (ADDRESS, LONG, ADDRESS, LONG, ADDRESS, LONG, LONG, *[ADDRESS] * 4)),
    "anycore_sample": (None, (ADDRESS, LONG, LONG, *[ADDRESS] * 5, INT, ADDRESS, ADDRESS)),
    "anycore_replay": (None, (ctypes.POINTER(Call), LONG)),
    "anycore_replay_texts": (None, (ADDRESS,)),
    **quantised.SIGNATURES,
}

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""In the order of `Kind` in elementwise.cpp."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outputs, inputs], float32 or bfloat16, in panels that the kernels read from end to end."""

    data: Tensor
    outputs: int
    inputs: int


class Kernels:
    """One level's library, loaded."""

    def __init__(self, path: Path, level: str, threads: int) -> None:
        """Raises NoKernels where the system refuses it."""
        try:
            self._library: Any = ctypes.CDLL(str(path))
            for name, (result, arguments) in SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise build.NoKernels(f"{path} cannot be loaded: {error}") from error
        if self._library.anycore_prepare() != 0:
            raise build.NoKernels(f"the operating system does not let this process use level {level}")
        self.level = level
        self.shelf = Shelf()
        self._arena = Arena()
        self.set_threads(threads)

    @property
    def library(self) -> Any:
        """Its functions, and while a step is recorded what notes their calls."""
        return self._library

    @contextmanager
    def recording(self, arena: Arena | None = None) -> Iterator[Recorder]:
        """Note the kernels that are called inside, which work in memory of their own. NotRecorded: torch computes."""
        library = self._library
        recorder = Recorder(library, SIGNATURES)
        self._library = recorder
        try:
            with OnlyKernels(self._arena if arena is None else arena, self.join):
                yield recorder
        finally:
            self._library = library

    def replay(self, calls: ctypes.Array[Call]) -> None:
        self._library.anycore_replay(calls, len(calls))

    def set_threads(self, count: int) -> None:
        """How many threads share a call's work, the caller among them."""
        self.threads = count
        self._library.anycore_threads(count)

    def pack(self, weight: Tensor) -> PackedMatrix:
        """[outputs, inputs] → the same numbers in panels."""
        outputs, inputs = weight.shape
        wide = is_wide(weight.dtype)
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        size = self._library.anycore_packed_size(outputs, inputs, wide)
        data = self.shelf.empty(size, weight.dtype) if wide else torch.empty(size, dtype=weight.dtype)
        self._library.anycore_pack(weight.data_ptr(), weight.stride(0), outputs, inputs, wide, data.data_ptr())
        return PackedMatrix(data, outputs, inputs)

    def linear(self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None, wide: bool = False) -> Tensor:
        """[.., inputs] → [.., outputs], in float32 if `wide`."""
        dtype = matrix.data.dtype
        if x.dtype != dtype or x.shape[-1] != matrix.inputs:
            wanted = f"{str(dtype).removeprefix('torch.')} rows of {matrix.inputs}"
            raise ValueError(f"a packed matrix is multiplied by {wanted}, not by {x.dtype} {tuple(x.shape)}")
        rows = x.reshape(-1, matrix.inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        bias = None if bias is None else bias.to(dtype).contiguous()
        expect("bias", bias, dtype, matrix.outputs)
        out = torch.empty(*x.shape[:-1], matrix.outputs, dtype=torch.float32 if wide else dtype)
        self._library.anycore_linear(
            rows.data_ptr(),
            len(rows),
            rows.stride(0),
            matrix.data.data_ptr(),
            matrix.inputs,
            matrix.outputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            is_wide(dtype),
            wide,
        )
        return out

    def attend(
        self,
        plan: KernelPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor | RoundedCache | None,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        norms: HeadNorms | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Store k and v, and attend: [T, Hq, D]. With norms or angles q and k, parts of one matrix, change in place."""
        if norms is None and angles is None:
            q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
        else:
            norms = None if norms is None else (norms[0].contiguous(), norms[1].contiguous(), norms[2])
            angles = None if angles is None else (angles[0].contiguous(), angles[1].contiguous())
        out = torch.empty(q.shape, dtype=q.dtype)
        what = arguments(plan, q, k, v, out, cache, scale, window, softcap, norms, angles)
        self._library.anycore_attention(what)
        return out

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> tuple[Tensor, Tensor]:
        """(LayerNorm, or RMSNorm if not `centred`, of x + residual; x + residual)."""
        wide = is_wide(x.dtype)
        x, residual = x.contiguous(), None if residual is None else residual.to(x.dtype).contiguous()
        weight, bias = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
        width = x.shape[-1]
        expect("residual", residual, x.dtype, *x.shape)
        expect("weight", weight, torch.float32, width)
        expect("bias", bias, torch.float32, width)
        out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        self._library.anycore_norm(
            x.data_ptr(),
            address(residual),
            weight.data_ptr(),
            address(bias),
            eps,
            x.numel() // width,
            width,
            centred,
            wide,
            total.data_ptr(),
            out.data_ptr(),
        )
        return out, total

    def activation(self, x: Tensor, kind: str, gated: bool) -> Tensor:
        """[.., I] → [.., I]; `gated`: [.., 2I] → [.., I], the first half activated times the second."""
        wide = is_wide(x.dtype)
        if kind not in ACTIVATIONS:
            raise ValueError(f"activation {kind!r} is not one of {', '.join(ACTIVATIONS)}")
        if gated and x.shape[-1] % 2 != 0:
            raise ValueError(f"a gated activation takes rows of two halves, not of {x.shape[-1]}")
        x = x.contiguous()
        width = x.shape[-1] // (2 if gated else 1)
        out = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
        rows = out.numel() // max(width, 1)
        self._library.anycore_activation(
            x.data_ptr(), rows, width, ACTIVATIONS.index(kind), gated, wide, out.data_ptr()
        )
        return out

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[.., I] each, of one type → [.., the sum of I], side by side."""
        first = parts[0]
        out = torch.empty(*first.shape[:-1], sum(x.shape[-1] for x in parts), dtype=first.dtype)
        rows, place, stride = first.numel() // max(first.shape[-1], 1), out.data_ptr(), out.shape[-1] * out.itemsize
        for x in parts:
            size = x.shape[-1] * x.itemsize
            self._library.anycore_place(x.contiguous().data_ptr(), rows, size, stride, place)
            place += size
        return out


def is_wide(dtype: torch.dtype) -> bool:
    """Whether kernels are told float32; False: bfloat16. Others are refused."""
    if dtype not in DTYPES:
        raise ValueError(f"the CPU kernels take float32 and bfloat16, not {dtype}")
    return dtype == torch.float32


def load(level: build.Level, threads: int) -> Kernels:
    """Load a level's library, compiled first where nobody has done so yet.

    Raises:
        NoKernels: it could not be compiled or loaded.
    """
    path = build.find(level)
    if path is None:
        log.info("compiling the CPU kernels for %s, once", level.name)
        started = time.monotonic()
        path = build.compile_library(level, build.cache_folder())
        log.info("compiled in %.1f s: %s", time.monotonic() - started, path)
    return Kernels(path, level.name, threads)


def load_best(flags: frozenset[str], threads: int) -> Kernels | None:
    """The library for this processor; None, with a word in the log, where plain torch has to do."""
    try:
        return load(build.choose(flags), threads)
    except ValueError as error:
        raise ConfigError(str(error), param=build.VARIABLE) from error
    except build.NoKernels as error:
        log.warning("no CPU kernels: %s. Plain torch computes, right but slower.", error)
        return None
