"""The CUDA backend's operations on a machine without a GPU: Triton's interpreter runs the kernels on host memory.

Its matrix products know no bfloat16, and it is slow: small float32 and float16 cases only.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is there, or triton was imported before TRITON_INTERPRET=1", allow_module_level=True)

from cuda_host import HostMemory
from triton import language
from triton.language import core
from triton.runtime import interpreter

from anycore.contract import checks
from anycore.contract.backend import Backend
from anycore.contract.rounded import RoundedCache
from anycore_cuda.ops import CudaOps


def let_scalars_be_indices(patch: Any = interpreter._patch_lang_tensor) -> None:
    """The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into integers."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_once_a_launch() -> None:
    """Let device functions find the language as their kernel's launch left it.

    The interpreter lists and patches the whole language at each call of one, which takes more than half of the time.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_new(function: Any) -> Any:
        modules = {value.__name__ for value in function.__globals__.values() if value is language or value is core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(function)

    def launch_new(executor: Any, *args: Any, **named: Any) -> None:
        patched.clear()  # the last launch has put everything back
        launch(executor, *args, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_new


def fill_caches_at_once(poison: Any = checks.PagedRun.poison) -> None:
    """Let the kit's cases begin with caches full of NaN that no kernel has put there: two thirds of their time."""

    def filled(run: checks.PagedRun, blocks: int) -> None:
        if not isinstance(run.backend.memory, HostMemory):
            poison(run, blocks)
            return
        for cache in run.kv:
            (cache.scale if isinstance(cache, RoundedCache) else cache).fill_(checks.NEVER)

    checks.PagedRun.poison = filled  # type: ignore[method-assign]


let_scalars_be_indices()
patch_once_a_launch()
fill_caches_at_once()


def interpreted(processors: int = 2) -> Backend:
    """A backend of the CUDA operations on host memory; more processors mean more splits of the keys."""
    memory = HostMemory(torch.device("cpu"))
    return Backend(memory.device, memory, CudaOps(memory, processors))
