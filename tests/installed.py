"""Plugins as if pip had installed them: a folder with a module and the metadata that names its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from anycore_cpu.kernels import build

ROOT = Path(__file__).parent.parent
ECHO = ROOT / "plugins" / "anycore-echo"
ONNX = ROOT / "plugins" / "anycore-onnx"
REQUEST_LOG = ROOT / "plugins" / "anycore-request-log"
KIT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""For processes that run the kit: it needs no plugin of pytest's, and other packages' take seconds to import."""


def install(folder: Path, name: str, version: str, entry: str, module: str, code: str | None = None) -> Path:
    """Write metadata (and the module's code, unless it stands elsewhere) into `folder`, which goes on the path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[anycore]\n{entry} = {module}\n")
    if code is not None:
        (folder / f"{module}.py").write_text(code)
    return folder


def install_echo(folder: Path, name: str = "anycore-echo", entry: str = "echo") -> Path:
    return install(folder, name, "0.1.0", entry, "anycore_echo")


def own_cache(folder: Path) -> Path:
    """Make an empty cache of a test's own, but for the compiled kernels of the CPU: they would take seconds anew."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = build.cache_folder()
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    return folder


def anycore(
    *words: str, path: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process, with the plugins in `path` on its path."""
    folders = [str(folder) for folder in (path, ECHO, ONNX, REQUEST_LOG) if folder is not None]
    mine = os.environ.items()
    environment = {name: value for name, value in mine if not name.startswith("ANYCORE_") or name == "ANYCORE_CACHE"}
    environment |= {"PYTHONPATH": os.pathsep.join(folders), **KIT, **(env or {})}
    command = [sys.executable, "-m", "anycore.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
