"""The CUDA backend of the house. It arrives through the entry point, exactly as a stranger's would."""

from __future__ import annotations

from anycore.contract.declare import BackendSpec
from anycore.hookspecs import hookimpl


@hookimpl
def register_backends() -> list[BackendSpec]:
    from anycore_cuda.support import SPEC

    return [SPEC]
