"""Puts the CPU kernels into wheels, a library a level, where there is a C++ compiler; without one the wheel is pure."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "backends/anycore_cpu/kernels/build.py"


class KernelsHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile all levels. Editable installs compile on first use instead."""
        machine = platform.machine().lower()
        if version != "standard" or machine not in ("x86_64", "amd64"):
            return
        build = load(Path(self.root) / BUILD)
        self.folder = tempfile.TemporaryDirectory()
        for level in build.LEVELS:
            try:
                path = build.compile_library(level, Path(self.folder.name))
            except build.NoKernels as error:
                self.app.display_warning(f"wheel without CPU kernels: {error}")
                build_data["force_include"].clear()
                return
            build_data["force_include"][str(path)] = f"anycore_cpu/kernels/built/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def load(path: Path) -> Any:
    """A module by its path: the package around it is not installed yet."""
    spec = importlib.util.spec_from_file_location("anycore_cpu_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
