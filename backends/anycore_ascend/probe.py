"""A cheap look at the machine's NPUs: packages, device files, CANN, driver, npu-smi. No torch, no torch_npu.

Every answer names what is missing and the command that helps.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from anycore.contract.declare import Device, Probe
from anycore_ascend.versions import RELEASES, key, made_for, release_of

INSTALL = "pip install 'anycore[ascend]'"
DRIVER = "usr/local/Ascend/driver"
SMI = ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi", "usr/bin/npu-smi")
SET_ENV = tuple(f"usr/local/Ascend/{name}/set_env.sh" for name in ("cann", "ascend-toolkit", "nnae"))
BESIDE = ("davinci_manager", "devmm_svm", "hisi_hdc")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
IN_A_CONTAINER = (
    "--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc "
    "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro"
)


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass
class Machine:
    """Where to look. ANYCORE_ASCEND_ROOT names another root directory: that of a chroot, or a test's."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    version: Callable[[str], str | None] = installed

    @property
    def root(self) -> Path:
        return Path(self.environ.get("ANYCORE_ASCEND_ROOT", "/"))

    def first(self, places: tuple[str, ...]) -> Path | None:
        return next((self.root / place for place in places if (self.root / place).exists()), None)


@dataclass(frozen=True)
class Trouble(Exception):
    """Why there is no device, and the next step."""

    reason: str
    advice: str


def probe(machine: Machine | None = None) -> Probe:
    """Return the NPUs this process may use, or why there are none."""
    machine = machine or Machine()
    versions: dict[str, str] = {}
    try:
        packages(machine, versions)
        numbers = device_files(machine)
        cann(machine, versions)
        driver(machine, versions)
        return Probe(devices=devices(machine, numbers), versions=versions)
    except Trouble as trouble:
        return Probe(reason=trouble.reason, advice=trouble.advice, versions=versions)
    except OSError as error:
        return Probe(reason=str(error), advice="See what npu-smi info says, as this user.", versions=versions)


def packages(machine: Machine, versions: dict[str, str]) -> None:
    """torch and torch_npu, which must be of the same release."""
    torch, npu = machine.version("torch"), machine.version("torch-npu")
    versions.update({name: found for name, found in (("torch", torch), ("torch_npu", npu)) if found})
    if torch is None or npu is None:
        raise Trouble(f"{'torch' if torch is None else 'torch_npu'} is not installed", INSTALL)
    if key(torch)[:3] != key(npu)[:3]:
        wanted = ".".join(map(str, key(npu)[:3]))
        raise Trouble(f"torch_npu {npu} needs torch {wanted}, installed is {torch}", f"pip install torch=={wanted}")


def device_files(machine: Machine) -> list[int]:
    """The numbers of /dev/davinci0, 1, ..."""
    found = (re.fullmatch(r"davinci(\d+)", path.name) for path in (machine.root / "dev").glob("davinci*"))
    numbers = sorted(int(match[1]) for match in found if match)
    if not numbers:
        raise Trouble(
            "there is no /dev/davinci*",
            f"Install the Ascend driver; in a container pass the NPU in: docker run {IN_A_CONTAINER} ...",
        )
    missing = [f"/dev/{name}" for name in BESIDE if not (machine.root / "dev" / name).exists()]
    if missing:
        options = " ".join(f"--device {path}" for path in missing)
        raise Trouble(f"/dev/davinci{numbers[0]} is there, {', '.join(missing)} is not", f"docker run {options} ...")
    return numbers


def cann(machine: Machine, versions: dict[str, str]) -> None:
    """CANN's libraries within the loader's reach, of a version that has what the backend calls."""
    script = machine.first(SET_ENV)
    home = machine.environ.get("ASCEND_TOOLKIT_HOME") or machine.environ.get("ASCEND_HOME_PATH")
    if home is None:
        if script is None:
            wanted = made_for(versions["torch_npu"]) or RELEASES[0].cann
            raise Trouble("CANN is not installed", f"Install CANN {wanted} (toolkit and kernels), or use its image.")
        raise Trouble(
            "CANN's environment is not set: ASCEND_TOOLKIT_HOME is missing", f"source {shown(machine, script)}"
        )
    folders = [folder for folder in machine.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if not any(Path(folder, "libascendcl.so").exists() for folder in folders):
        source = shown(machine, script) if script else f"{home}/../set_env.sh"
        raise Trouble(f"libascendcl.so is in none of the {len(folders)} folders of LD_LIBRARY_PATH", f"source {source}")
    found = cann_version(Path(home))
    if found is None:
        return
    versions["cann"] = found
    made = made_for(versions["torch_npu"])
    if key(found) < key(RELEASES[-1].cann):
        raise Trouble(
            f"CANN {found} is too old, {RELEASES[-1].cann} or newer is needed",
            f"Install CANN {made or RELEASES[0].cann}.",
        )
    if made is not None and key(made)[:2] != key(found)[:2]:
        versions["cann"] += f" (torch_npu {versions['torch_npu']} was built for {made})"


def cann_version(home: Path) -> str | None:
    """From the installer's notes, else from the folder's name."""
    for note in (*home.glob("**/ascend_toolkit_install.info"), *home.glob("version.info")):
        found = re.search(r"^\s*version\s*=\s*([\w.]+)", note.read_text(errors="replace"), re.IGNORECASE | re.MULTILINE)
        if found:
            return found[1]
    named = re.search(r"(?:cann-|ascend-toolkit/)(\d[\w.]*)", str(home.resolve()))
    return named[1] if named else None


def driver(machine: Machine, versions: dict[str, str]) -> None:
    """A driver that is new enough for this CANN. In a container its folder may be missing: then npu-smi is all."""
    note = machine.root / DRIVER / "version.info"
    if not note.exists():
        return
    found = re.search(r"^\s*version\s*=\s*([\w.]+)", note.read_text(errors="replace"), re.IGNORECASE | re.MULTILINE)
    if not found:
        return
    versions["driver"] = found[1]
    release = release_of(versions.get("cann", ""))
    if release is not None and key(found[1])[:2] < key(release.driver):
        raise Trouble(
            f"driver {found[1]} is too old: CANN {versions['cann']} needs {release.driver} or newer",
            "Install a newer Ascend HDK on the host (the driver is the host's, a container cannot bring it).",
        )


def devices(machine: Machine, numbers: list[int]) -> tuple[Device, ...]:
    """What npu-smi lists, restricted to the device files here and to ASCEND_RT_VISIBLE_DEVICES."""
    smi = machine.first(SMI)
    if smi is None:
        raise Trouble(
            "npu-smi is not found in /usr/local/bin", f"Install the driver's tools; docker run {IN_A_CONTAINER} ..."
        )
    done = subprocess.run([smi, "info"], capture_output=True, text=True, timeout=20, check=False)
    boards = [board for board in parse(done.stdout) if board[0] in numbers]
    if not boards:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Trouble(
            f"npu-smi info lists no NPU: {said[-1] if said else 'it printed nothing'}", "Run npu-smi info as this user."
        )
    if VISIBLE in machine.environ:
        words = [word.strip() for word in machine.environ[VISIBLE].split(",")]
        chosen = [boards[int(word)] for word in words if word.isdigit() and int(word) < len(boards)]
        if not chosen:
            raise Trouble(
                f"{VISIBLE}={machine.environ[VISIBLE]!r} leaves none of {len(boards)} NPUs visible", f"Unset {VISIBLE}."
            )
        boards = chosen
    return tuple(Device(index, f"Ascend {name}", chip_of(name), size) for index, (_, name, size) in enumerate(boards))


def parse(table: str) -> list[tuple[int, str, int]]:
    """Number, name and bytes of memory of each chip in npu-smi's table, which gives two lines to each.

    | 3     910B3               | OK            | 93.0        39                0    / 0             |
    | 0                         | 0000:C1:00.0  | 0           0    / 0          3394 / 65536         |

    Where a board carries two chips, the second line holds the chip's own number beside its place on the board.
    """
    boards: list[tuple[int, str, int]] = []
    head: re.Match[str] | None = None
    for line in table.splitlines():
        board = re.match(r"\|\s*(\d+)\s+(?:Ascend)?(\d{3}\w*(?:-\d)?)\s*\|\s*\w+\s*\|", line)
        chip = re.match(r"\|\s*\d+\s*(\d*)\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f:.]+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$", line)
        if board:
            head = board
        elif chip and head:
            boards.append((int(chip[1] or head[1]), head[2], int(chip[3]) * 2**20))
            head = None
    return boards


def chip_of(name: str) -> str:
    """The family: 910B for 910B1 ... B4, 910C for what npu-smi calls 910 with or without a suffix of 93."""
    if name.startswith(("910A", "910Pro")):
        return "910"
    for chip in ("910B", "310P", "950"):
        if name.startswith(chip):
            return chip
    return "910C" if name.startswith("910") else name


def shown(machine: Machine, path: Path) -> str:
    """A path as the operator sees it."""
    return "/" + str(path.relative_to(machine.root))
