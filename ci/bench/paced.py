"""A device that computes nothing and takes its time: with it, a prediction has all to get right but the device.

A plugin, which `simulated.py --paced` installs into a folder of its own; the device is in `paced_device.py`. It can
also let a front wait before each piece of text that it sends, so that fronts are short of time wherever this runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anycore import hookimpl
from anycore.contract.declare import FEATURES, BackendSpec, Device, Level, Probe, Support, Task

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

SLOWER = 1.0
PIECE_SECONDS = 0.0  # of a piece of text that a front sends, beside what it takes itself
TOTAL = 4 << 30


def open_device(index: int) -> Backend:
    from paced_device import Paced

    return Paced(SLOWER, TOTAL)


SPEC = BackendSpec(
    name="paced",
    api=(1, 1),
    support=(
        Support((Task.GENERATE,), "causal", ("float32",), Level.REFERENCE, block_sizes=(16,), features=tuple(FEATURES)),
    ),
    probe=lambda: Probe(devices=(Device(0, "paced", "paced", TOTAL),)),
    open=open_device,
    priority=-100,
)


@hookimpl
def register_backends() -> list[BackendSpec]:
    module: Any = sys.modules.get("anycore.server.completions")  # in fronts alone
    if PIECE_SECONDS and module is not None and module.event.__name__ != "late":
        event = module.event

        def late(payload: Any) -> bytes:
            if any(choice["text"] for choice in payload["choices"]):
                time.sleep(PIECE_SECONDS)
            return bytes(event(payload))

        module.event = late
    return [SPEC]


def install(folder: Path, slower: float, piece_seconds: float = 0.0) -> Path:
    """Write both files and their metadata into a folder, which goes on PYTHONPATH."""
    info = folder / "anycore_paced-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anycore-paced\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[anycore]\npaced = paced\n")
    code = Path(__file__).read_text().replace("SLOWER = 1.0\n", f"SLOWER = {slower!r}\n", 1)
    code = code.replace("PIECE_SECONDS = 0.0 ", f"PIECE_SECONDS = {piece_seconds!r} ", 1)
    (folder / "paced.py").write_text(code)
    (folder / "paced_device.py").write_text(Path(__file__).with_name("paced_device.py").read_text())
    return folder
