"""Kernels compiled for the card by processes that have none, so that many of them can do it side by side."""

from __future__ import annotations

from typing import Any


class Driver:
    """What Triton asks of a device in order to compile for it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def only_compile() -> None:
    """From now on, in this process, launching a kernel puts it into the disk cache and does nothing else."""
    import triton
    from triton.compiler.compiler import CompiledKernel

    def leave_out(kernel: Any) -> None:
        kernel.module, kernel.function, kernel._run = "none", 0, lambda *arguments: None

    triton.runtime.driver.set_active(Driver())
    CompiledKernel._init_handles = leave_out
