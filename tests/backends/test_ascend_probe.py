"""The Ascend backend's look at a machine: each thing that can be missing is named, with the command that helps."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from anycore.contract.declare import Level, Need, Probe, Task, explain
from anycore_ascend.probe import Machine, chip_of, parse, probe
from anycore_ascend.support import SUPPORT
from anycore_ascend.versions import RELEASES, key, made_for, release_of

PAIR = """\
| 0     Ascend910           | OK            | 171.6       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3139 / 65536         |
| 0     Ascend910           | OK            | -           35                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2900 / 65536         |
"""
SINGLE = """\
| npu-smi 25.5.0                   Version: 25.5.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B4-1             | OK            | 93.0        39                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3394 / 65536         |
| 3     910B4-1             | OK            | 91.8        37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          27547/ 32768         |
"""
TOOLKIT = "usr/local/Ascend/ascend-toolkit"


class Site:
    """A machine that lacks nothing, as a folder; tests take things away."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = {"torch": "2.9.0+cpu", "torch-npu": "2.9.0"}
        for name in ("dev/davinci0", "dev/davinci3", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"):
            self.write(name, "")
        self.write("usr/local/bin/npu-smi", f"#!/bin/sh\ncat <<'END'\n{SINGLE}END\n").chmod(0o755)
        self.write("usr/local/Ascend/driver/version.info", "Version=25.5.0\nascendhal_version=7.35\n")
        self.write(f"{TOOLKIT}/set_env.sh", "")
        self.write(f"{TOOLKIT}/latest/x86_64-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.5.0\n")
        self.write(f"{TOOLKIT}/latest/lib64/libascendcl.so", "")
        home = root / TOOLKIT / "latest"
        self.environ = {
            "ANYCORE_ASCEND_ROOT": str(root),
            "ASCEND_TOOLKIT_HOME": str(home),
            "LD_LIBRARY_PATH": f"/nowhere:{home / 'lib64'}",
        }

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def probe(self) -> Probe:
        return probe(Machine(self.environ, self.packages.get))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_devices_versions_and_memory(site: Site) -> None:
    found = site.probe()
    assert [(d.index, d.name, d.chip, d.memory) for d in found.devices] == [
        (0, "Ascend 910B4-1", "910B", 65536 * 2**20),
        (1, "Ascend 910B4-1", "910B", 32768 * 2**20),
    ]
    assert found.versions == {"torch": "2.9.0+cpu", "torch_npu": "2.9.0", "cann": "8.5.0", "driver": "25.5.0"}


def test_only_visible_devices_with_a_device_file(site: Site) -> None:
    site.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
    assert [(d.index, d.memory) for d in site.probe().devices] == [(0, 32768 * 2**20)]
    site.environ["ASCEND_RT_VISIBLE_DEVICES"] = "7"
    assert "leaves none of 2 NPUs visible" in site.probe().reason
    del site.environ["ASCEND_RT_VISIBLE_DEVICES"]
    (site.root / "dev/davinci0").unlink()
    assert [d.memory for d in site.probe().devices] == [32768 * 2**20]


def test_what_is_missing_is_named(site: Site) -> None:
    def refused(reason: str, advice: str) -> None:
        found = site.probe()
        assert not found.devices
        assert reason in found.reason, found.reason
        assert advice in found.advice, found.advice

    (site.root / "usr/local/bin/npu-smi").write_text("#!/bin/sh\necho dcmi module initialize failed. ret is -8005\n")
    refused("dcmi module initialize failed. ret is -8005", "npu-smi info")
    (site.root / "usr/local/bin/npu-smi").unlink()
    refused("npu-smi is not found", "-v /usr/local/bin/npu-smi")
    site.write("usr/local/Ascend/driver/version.info", "Version=24.1.0\n")
    refused("driver 24.1.0 is too old: CANN 8.5.0 needs 25.0 or newer", "Ascend HDK")
    site.write(f"{TOOLKIT}/latest/x86_64-linux/ascend_toolkit_install.info", "version=8.0.RC3\n")
    refused("CANN 8.0.RC3 is too old, 8.2.RC1 or newer is needed", "Install CANN 8.5.0")
    site.environ["LD_LIBRARY_PATH"] = "/nowhere"
    refused("libascendcl.so is in none of the 1 folders", f"source /{TOOLKIT}/set_env.sh")
    del site.environ["ASCEND_TOOLKIT_HOME"]
    refused("CANN's environment is not set", f"source /{TOOLKIT}/set_env.sh")
    shutil.rmtree(site.root / TOOLKIT)
    refused("CANN is not installed", "Install CANN 8.5.0")
    (site.root / "dev/hisi_hdc").unlink()
    refused("/dev/hisi_hdc is not", "--device /dev/hisi_hdc")
    shutil.rmtree(site.root / "dev")
    refused("there is no /dev/davinci*", "docker run --device /dev/davinci0")
    site.packages["torch"] = "2.13.0"
    refused("torch_npu 2.9.0 needs torch 2.9.0, installed is 2.13.0", "pip install torch==2.9.0")
    del site.packages["torch-npu"]
    refused("torch_npu is not installed", "anycore[ascend]")


def test_a_pair_that_was_not_made_for_each_other_is_shown(site: Site) -> None:
    site.write(f"{TOOLKIT}/latest/x86_64-linux/ascend_toolkit_install.info", "version=9.1.0\n")
    assert site.probe().versions["cann"] == "9.1.0 (torch_npu 2.9.0 was built for 8.5.0)"


def test_chips() -> None:
    assert parse(PAIR) == [(0, "910", 65536 * 2**20), (1, "910", 65536 * 2**20)]
    names = ("910B3", "910", "910_9391", "310P3", "950PR", "910ProB", "910A")
    assert [chip_of(name) for name in names] == ["910B", "910C", "910C", "310P", "950", "910", "910"]


def test_every_refused_chip_gets_its_reason() -> None:
    refused = [row for row in SUPPORT if row.level is Level.UNSUPPORTED]
    assert {chip for row in refused for chip in row.chips} == {"310P", "950", "910"}
    for row in refused:
        need = Need(row.tasks[0], row.attention, "X", "float16", 64, chip=row.chips[0])
        assert row.note in explain(SUPPORT, need)
    causal = Need(Task.GENERATE, "causal", "X", "bfloat16", 128, block_size=16, chip="910B")
    assert "block size 16 is not among 128" in explain(SUPPORT, causal)


def test_versions() -> None:
    assert [key(row.cann) for row in RELEASES] == sorted((key(row.cann) for row in RELEASES), reverse=True)
    assert made_for("2.9.0") == "8.5.0"
    assert made_for("9.9.9") is None
    newest = release_of("9.1.0-beta.3")
    assert newest is not None
    assert newest.driver == "25.2"
    assert len({name for row in RELEASES for name in row.torch_npu}) == sum(len(row.torch_npu) for row in RELEASES)


def test_nothing_heavy_is_imported() -> None:
    assert "torch_npu" not in sys.modules
