"""The Ascend backend of the house. It arrives through the entry point, exactly as a stranger's would."""

from __future__ import annotations

import os
from importlib.util import find_spec

from anycore.contract.declare import BackendSpec
from anycore.hookspecs import hookimpl


@hookimpl
def register_backends() -> list[BackendSpec]:
    from anycore_ascend.support import SPEC

    if find_spec("torch_npu") is not None:
        # `import torch` would load it by itself, and fail for every backend where CANN is missing. `open` loads it.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return [SPEC]
