"""anycore: one inference core on any hardware. The public names, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from anycore.engine.request import Beams, PoolingParams, SamplingParams
    from anycore.hookspecs import hookimpl
    from anycore.llm import LLM
    from anycore.toolbox import FunctionTool, ToolConfig

_HOMES = {
    "Beams": "anycore.engine.request",
    "FunctionTool": "anycore.toolbox",
    "LLM": "anycore.llm",
    "PoolingParams": "anycore.engine.request",
    "SamplingParams": "anycore.engine.request",
    "ToolConfig": "anycore.toolbox",
    "hookimpl": "anycore.hookspecs",
}

__all__ = ["LLM", "Beams", "FunctionTool", "PoolingParams", "SamplingParams", "ToolConfig", "__version__", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'anycore' has no attribute {name!r}")
