"""Puts the CPU kernels into wheels, a library a level: by ziglang, for any Linux since glibc 2.28, or by the system's
compiler, for systems like this one. Where neither can do it the wheel is pure.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "backends/anycore_cpu/kernels/build.py"
VARIABLE = "ANYCORE_WHEEL_MACHINE"
"""Names the processors that the wheel is for, x86_64 or aarch64, if not those of this machine; then by ziglang."""

ZIGLANG = "ziglang>=0.13,<1"


class KernelsHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    def dependencies(self) -> list[str]:
        """A compiler of 100 MB, where there is none to build with."""
        build = load(Path(self.root) / BUILD)
        other = VARIABLE in os.environ
        return [ZIGLANG] if levels_of(build) and (other or build.compiler() is None) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile all levels. Editable installs compile on first use instead."""
        build = load(Path(self.root) / BUILD)
        levels = levels_of(build)
        if version != "standard" or not levels:
            return
        other = VARIABLE in os.environ
        using = build.zig(f"{machine()}-linux-gnu.2.28") or (None if other else build.compiler())
        self.folder = tempfile.TemporaryDirectory()
        try:
            if using is None:
                raise build.NoKernels("ziglang is not installed" if other else build.NO_COMPILER)
            paths = [build.compile_library(level, Path(self.folder.name), using) for level in levels]
        except build.NoKernels as error:
            if other:
                raise
            self.app.display_warning(f"wheel without CPU kernels: {error}")
            return
        for path in paths:
            build_data["force_include"][str(path)] = f"anycore_cpu/kernels/built/{path.name}"
        here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{f'manylinux_2_28_{machine()}' if using.zig else here}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def machine() -> str:
    return os.environ.get(VARIABLE) or platform.machine()


def levels_of(build: Any) -> list[Any]:
    """What a wheel carries: nothing on other systems than Linux, nor for processors that have no level."""
    if platform.system() != "Linux":
        return []
    return [level for level in build.LEVELS if level.machine == machine()]


def load(path: Path) -> Any:
    """A module by its path: the package around it is not installed yet."""
    spec = importlib.util.spec_from_file_location("anycore_cpu_kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
