"""A machine with NPUs, as files and environment: device nodes, npu-smi, CANN's folders and what its set_env.sh sets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")

TABLE_HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi {driver:<25}Version: {driver:<53}|
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
TABLE_ROW = """\
| {index:<5} {name:<20}| OK            | 92.5        36                0    / 0             |
| {chip:<26}| 0000:{bus:02X}:00.0  | 0           0    / 0          {used:>5} / {total:<13}|
+===========================+===============+====================================================+
"""


@dataclass(frozen=True)
class Machine:
    """What a test wants to stand on. `soc` is the runtime's name of the chip, `named` is npu-smi's."""

    devices: int = 1
    soc: str = "Ascend910B3"
    named: str = "910B3"
    memory_mib: int = 2048
    cann: str = "9.1.0"
    driver: str = "25.5.1"
    graphs: bool = True

    def write(self, folder: Path, libraries: Path) -> dict[str, str]:
        """Lay the machine out under `folder`; return the environment of a process on it."""
        self._devices(folder)
        home = self._cann(folder, libraries)
        self._driver(folder)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ASCEND_", "STANDIN_"))},
            "ANYCORE_ASCEND_ROOT": str(folder),
            "ANYCORE_CACHE": str(folder / "cache"),  # what is proven here is not proven of this computer's devices
            "ASCEND_HOME_PATH": str(home),
            "ASCEND_TOOLKIT_HOME": str(home),
            "ASCEND_OPP_PATH": str(home / "opp"),
            "LD_LIBRARY_PATH": str(home / "lib64"),
            "STANDIN_DEVICES": str(self.devices),
            "STANDIN_SOC": self.soc,
            "STANDIN_HBM_MIB": str(self.memory_mib),
            "STANDIN_CANN": self.cann,
            "STANDIN_NO_GRAPHS": "0" if self.graphs else "1",
            "TASK_QUEUE_ENABLE": "0",  # everything is synchronous here
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TORCH_NPU_FALLBACK_CPU_DISABLE": "1",
        }

    def _devices(self, folder: Path) -> None:
        dev = folder / "dev"
        dev.mkdir(parents=True)
        for name in (*NODES, *(f"davinci{index}" for index in range(self.devices))):
            (dev / name).touch()
        table = TABLE_HEAD.format(driver=self.driver)
        for index in range(self.devices):
            row = {"index": index, "name": self.named, "chip": 0, "bus": 193 + index}
            table += TABLE_ROW.format(**row, used=0, total=self.memory_mib)
        smi = folder / "usr/local/bin/npu-smi"
        smi.parent.mkdir(parents=True)
        smi.write_text(f"#!/bin/sh\ncat <<'END'\n{table}END\n")
        smi.chmod(0o755)

    def _cann(self, folder: Path, libraries: Path) -> Path:
        home = folder / "usr/local/Ascend/ascend-toolkit/latest"
        for part in ("runtime", "compiler", "opp", f"{os.uname().machine}-linux"):
            (home / part).mkdir(parents=True)
        (home / "lib64").symlink_to(libraries.resolve())
        note = f"package_name=Ascend-cann-toolkit\nversion={self.cann}\ninnerversion=V100R001C23SPC001\n"
        (home / f"{os.uname().machine}-linux" / "ascend_toolkit_install.info").write_text(note)
        (home.parent / "set_env.sh").write_text(f"export ASCEND_TOOLKIT_HOME={home}\n")
        return home

    def _driver(self, folder: Path) -> None:
        note = folder / "usr/local/Ascend/driver/version.info"
        note.parent.mkdir(parents=True)
        note.write_text(f"Version={self.driver}\n")


A2 = Machine()
A3 = Machine(soc="Ascend910_9391", named="Ascend910")
INFERENCE = Machine(soc="Ascend310P3", named="310P3")
