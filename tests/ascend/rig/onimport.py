"""Installs the references as soon as torch_npu is imported, in every process of the suite's environment.

A .pth file of that environment imports this module: nothing is loaded until somebody asks for torch_npu.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

INSTALLED: list[Any] = []
"""The rig, once torch_npu has been imported."""


class Loader(importlib.abc.Loader):
    """torch_npu's loader, and the rig after it."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.own.exec_module(module)
        from rig.install import Rig

        INSTALLED.append(Rig())


class Finder(importlib.abc.MetaPathFinder):
    """Finds torch_npu where it is, with another loader."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
