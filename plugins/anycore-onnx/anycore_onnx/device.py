"""One execution provider, open: its memory, and the model's ONNX file, found or made."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from anycore.contract.backend import Backend, Forward, Memory, ModelFiles
from anycore.contract.host import memory_free, memory_total
from anycore.contract.ops import Ops
from anycore.errors import ConfigError, PluginError, Unsupported
from anycore_onnx import ON_HOST, providers
from anycore_onnx.export import exported
from anycore_onnx.graph import Graph

FILES = ("model.onnx", "onnx/model.onnx")
"""Where optimum and sentence-transformers put a model's graph."""

EXPORT = "export"
"""What ANYCORE_ONNX_FILE says to have the graph made anew, whatever files there are."""

TORCH_MODULES = {"CUDA": "cuda", "Tensorrt": "cuda", "ROCM": "cuda", "MIGraphX": "cuda", "CANN": "npu"}
"""Providers whose memory torch can be asked about, and its module for them."""

log = logging.getLogger(__name__)


class HostMemory(Memory):
    def total(self) -> int:
        return memory_total()

    def free(self) -> int:
        return memory_free()


class TorchMemory(Memory):
    """What torch's module for the same device says. Tensors of the engine stay on the host all the same."""

    def __init__(self, module: Any) -> None:
        super().__init__(torch.device("cpu"))
        self.module = module

    def total(self) -> int:
        return int(self.module.mem_get_info()[1])

    def free(self) -> int:
        return int(self.module.mem_get_info()[0])


class StatedMemory(Memory):
    """What the operator says, where nobody can be asked."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.size = size

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size


class OnnxBackend(Backend):
    name = "onnx"

    def __init__(self, index: int) -> None:
        found = providers(onnxruntime.get_available_providers(), os.environ)
        if not 0 <= index < len(found):
            raise PluginError(f"the onnx backend has devices 0 to {len(found) - 1}, not {index}", param="device")
        self.providers = found[index:]  # ONNX Runtime gives later ones what the first one cannot compute
        super().__init__(torch.device("cpu"), memory_of(found[index]), Ops())

    def load_model(self, files: ModelFiles) -> Forward:
        """Load the model's graph; make one first if it has none."""
        if files.file is not None:
            raise Unsupported(f"{files.file.name} is a GGUF file, and the onnx backend needs an ONNX graph or a folder")
        path = given(files.folder) or exported(files)
        log.info("onnx: %s on %s", path, self.providers[0])
        return Graph(path, self.providers, files)


def given(folder: Path) -> Path | None:
    """The graph that came with the model, or the one that ANYCORE_ONNX_FILE names."""
    name = os.environ.get("ANYCORE_ONNX_FILE", "")
    if name == EXPORT:
        return None
    if name:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            raise ConfigError(f"ANYCORE_ONNX_FILE is {name!r}, and {folder} holds no such file")
        return path
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def memory_of(provider: str) -> Memory:
    """The memory that a provider computes in.

    Raises:
        PluginError: nobody says how much there is.
    """
    if provider in ON_HOST:
        return HostMemory(torch.device("cpu"))
    stated = os.environ.get("ANYCORE_ONNX_MEMORY", "")
    if stated:
        if not stated.isdigit():
            raise ConfigError(f"ANYCORE_ONNX_MEMORY must be a number of bytes, not {stated!r}")
        return StatedMemory(int(stated))
    name = TORCH_MODULES.get(provider.removesuffix("ExecutionProvider"), "")
    if name == "npu" and importlib.util.find_spec("torch_npu"):
        importlib.import_module("torch_npu")
    module = getattr(torch, name, None) if name else None
    if module is None or not module.is_available():
        raise PluginError(
            f"neither ONNX Runtime nor this torch says how much memory {provider} has: "
            "set ANYCORE_ONNX_MEMORY to its bytes",
            param="backend",
        )
    return TorchMemory(module)
