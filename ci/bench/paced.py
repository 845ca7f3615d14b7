"""A device that computes nothing and takes its time: with it, a prediction has all to get right but the device.

A plugin, which `simulated.py --paced` installs into a folder of its own; the device is in `paced_device.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anycore import hookimpl
from anycore.contract.declare import FEATURES, BackendSpec, Device, Level, Probe, Support, Task

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

SLOWER = 1.0
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
    return [SPEC]


def install(folder: Path, slower: float) -> Path:
    """Write both files and their metadata into a folder, which goes on PYTHONPATH."""
    info = folder / "anycore_paced-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anycore-paced\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[anycore]\npaced = paced\n")
    code = Path(__file__).read_text().replace("SLOWER = 1.0\n", f"SLOWER = {slower!r}\n", 1)
    (folder / "paced.py").write_text(code)
    (folder / "paced_device.py").write_text(Path(__file__).with_name("paced_device.py").read_text())
    return folder
