"""Launching a compiled kernel at once: Triton's own way finds it anew each time, for 20 to 40 microseconds.

What a kernel was compiled for is told by the arguments: the types, devices and alignment of tensors, what Triton wants
to know of integers, and all constants and options. Calls that agree in these run the same binary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

KNOWN = triton.__version__.startswith("3.6.")
"""Compiled kernels are called as this version calls them; with others every launch goes Triton's own way."""
INT32 = 1 << 31


class Launcher:
    """Remembers compiled kernels by what they were compiled for."""

    def __init__(self, direct: bool = KNOWN) -> None:
        self._direct = direct
        self._ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._compiling: dict[tuple[Any, ...], Any] | None = None  # inside `compiling`: what is under way
        self._asked: set[tuple[Any, ...]] = set()

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Run `kernel[grid](*args, **constants)`: what varies stands in `args`, constants and options have names."""
        kinds: list[Any] = []
        values: list[Any] = []
        device = -1
        for arg in args:
            kind = type(arg)
            if kind is int:
                kinds.append((arg == 1) | (arg % 16 == 0) << 1 | (not -INT32 <= arg < INT32) << 2)
                values.append(arg)
            elif kind is float:
                kinds.append(float)
                values.append(arg)
            elif kind.__name__ == "TensorDescriptor":  # which not every version of Triton has
                kinds += (arg.base.dtype, *arg.block_shape)
                values.append(arg)
            else:
                device = arg.get_device()
                pointer = arg.data_ptr()
                kinds += (arg.dtype, device, pointer % 16 == 0)
                values.append(pointer)
        key = (kernel, *constants, *constants.values(), *kinds)
        if self._compiling is not None:
            _patiently(hash, kernel)  # the first time parses it, beside threads that parse others
        ready = self._ready.get(key)
        if self._compiling is not None:
            if ready is None and key not in self._compiling:
                self._compiling[key] = kernel.warmup(*args, grid=grid, **constants)
            return
        if ready is None:
            compiled = kernel[grid](*args, **constants)
            if compiled is not None and self._direct and _is_split(kernel, len(args)):
                self._ready[key] = _parts(compiled, len(kernel.params) - len(args))
            return
        run, function, metadata, stream_of, rest = ready
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *values, *rest)

    def rehearses(self, *key: Any) -> bool:
        """Whether this is the first time inside `compiling` that somebody asks so: for him to launch all variants."""
        if self._compiling is None or key in self._asked:
            return False
        self._asked.add(key)
        return True

    @contextmanager
    def compiling(self, device: torch.device) -> Iterator[None]:
        """Inside, nothing is launched: the kernels asked for are compiled on many threads, and loaded at the end.

        What they would have written is left as it was. Where Triton's version is not known, they are launched.
        """
        if not self._direct:
            yield
            return
        self._compiling = {}
        try:
            with _Threads(os.cpu_count(), "compile", torch.cuda.set_device, (device,)) as threads:
                with triton.AsyncCompileMode(threads):
                    yield
                kernels = {found.result() if hasattr(found, "result") else found for found in self._compiling.values()}
                list(threads.map(_load, kernels))
        finally:
            self._compiling = None
            self._asked.clear()


class _Threads(ThreadPoolExecutor):
    """Threads that compile. Python 3.11 now and then fails to parse on several at a time; then they do it again."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        return super().submit(_patiently, work, *args, **named)


def _patiently(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    for _ in range(20):
        try:
            return work(*args, **named)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, SystemError):
                cause = cause.__cause__
            if cause is None:
                raise
    return work(*args, **named)


def _load(kernel: Any) -> None:
    """Bring a compiled kernel onto the device, and build what launches it."""
    kernel._init_handles()


def _is_split(kernel: Any, count: int) -> bool:
    """Whether the first `count` parameters are no constants and all others are."""
    return [parameter.is_constexpr for parameter in kernel.params] == [i >= count for i in range(len(kernel.params))]


def _parts(compiled: Any, constants: int) -> tuple[Any, ...]:
    """What a launch needs of a compiled kernel; constants are in the binary, only their places are left."""
    stream_of = triton.runtime.driver.active.get_current_stream
    return compiled.run, compiled.function, compiled.packed_metadata, stream_of, (None,) * constants


launch = Launcher()
