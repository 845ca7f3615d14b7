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
ASCEND = "usr/local/Ascend"
BESIDE = ("davinci_manager", "devmm_svm", "hisi_hdc")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
FAMILIES = {"910A": "910", "910Pro": "910", "910B": "910B", "910": "910C", "310P": "310P", "950": "950"}
"""By how npu-smi's names begin; plain 910 and 910_93 are what it calls the 910C."""

CONTAINER = "docker run --device /dev/davinci0 " + " ".join(f"--device /dev/{name}" for name in BESIDE)
MOUNTS = f"-v /{ASCEND}/driver:/{ASCEND}/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro"
BOARD = re.compile(r"\|\s*(\d+)\s+(?:Ascend)?(\d{3}\w*(?:-\d)?)\s*\|\s*\w+\s*\|")
CHIP = re.compile(r"\|\s*\d+\s*(\d*)\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f:.]+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$")


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


@dataclass
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
        numbers = device_files(machine.root)
        cann(machine, versions)
        driver(machine.root, versions)
        return Probe(devices=devices(machine, numbers), versions=versions)
    except Trouble as trouble:
        return Probe(reason=trouble.reason, advice=trouble.advice, versions=versions)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(reason=str(error), advice="See what npu-smi info says, as this user.", versions=versions)


def packages(machine: Machine, versions: dict[str, str]) -> None:
    """torch and torch_npu, which must be of the same release."""
    torch, npu = machine.version("torch"), machine.version("torch-npu")
    versions.update({name: found for name, found in (("torch", torch), ("torch_npu", npu)) if found})
    if torch is None or npu is None:
        raise Trouble(f"{'torch' if torch is None else 'torch_npu'} is not installed", INSTALL)
    wanted = ".".join(map(str, key(npu)[:3]))
    if key(torch)[:3] != key(npu)[:3]:
        raise Trouble(f"torch_npu {npu} needs torch {wanted}, installed is {torch}", f"pip install torch=={wanted}")


def device_files(root: Path) -> list[int]:
    """The numbers of /dev/davinci0, 1, ..."""
    found = (re.fullmatch(r"davinci(\d+)", path.name) for path in (root / "dev").glob("davinci*"))
    numbers = sorted(int(match[1]) for match in found if match)
    if not numbers:
        advice = f"Install the Ascend driver; in a container pass the NPU in: {CONTAINER} {MOUNTS} ..."
        raise Trouble("there is no /dev/davinci*", advice)
    missing = [f"/dev/{name}" for name in BESIDE if not (root / "dev" / name).exists()]
    if missing:
        options = " ".join(f"--device {path}" for path in missing)
        raise Trouble(f"/dev/davinci{numbers[0]} is there, {', '.join(missing)} is not", f"docker run {options} ...")
    return numbers


def cann(machine: Machine, versions: dict[str, str]) -> None:
    """CANN's libraries within the loader's reach, of a version that has what the backend calls."""
    made = made_for(versions["torch_npu"])
    scripts = [f"{ASCEND}/{name}/set_env.sh" for name in ("cann", "ascend-toolkit", "nnae")]
    source = next((f"source /{path}" for path in scripts if (machine.root / path).exists()), None)
    home = machine.environ.get("ASCEND_TOOLKIT_HOME") or machine.environ.get("ASCEND_HOME_PATH")
    if home is None and source is None:
        wanted = made or RELEASES[0].cann
        raise Trouble("CANN is not installed", f"Install CANN {wanted} (toolkit and kernels), or use its image.")
    if home is None:
        raise Trouble("CANN's environment is not set: ASCEND_TOOLKIT_HOME is missing", source or "")
    folders = [folder for folder in machine.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if not any(Path(folder, "libascendcl.so").exists() for folder in folders):
        reason = f"libascendcl.so is in none of the {len(folders)} folders of LD_LIBRARY_PATH"
        raise Trouble(reason, source or f"source {home}/../set_env.sh")
    found = cann_version(Path(home))
    if found is None:
        return
    versions["cann"] = found
    if key(found) < key(RELEASES[-1].cann):
        advice = f"Install CANN {made or RELEASES[0].cann}."
        raise Trouble(f"CANN {found} is too old, {RELEASES[-1].cann} or newer is needed", advice)
    if made is not None and key(made)[:2] != key(found)[:2]:
        versions["cann"] += f" (torch_npu {versions['torch_npu']} was built for {made})"


def cann_version(home: Path) -> str | None:
    """From the installer's notes, else from the folder's name."""
    notes = (*home.glob("*/ascend_toolkit_install.info"), *home.glob("*.info"))
    noted = next(filter(None, map(version_in, notes)), None)
    named = re.search(r"(?:cann-|ascend-toolkit/)(\d[\w.]*)", str(home.resolve()))
    return noted or (named[1] if named else None)


def version_in(note: Path) -> str | None:
    found = re.search(r"^version\s*=\s*([\w.]+)", note.read_text(errors="replace"), re.IGNORECASE | re.MULTILINE)
    return found[1] if found else None


def driver(root: Path, versions: dict[str, str]) -> None:
    """A driver that is new enough for this CANN, if its folder can be seen: some containers lack it."""
    note = root / ASCEND / "driver/version.info"
    found = version_in(note) if note.exists() else None
    if found is None:
        return
    versions["driver"] = found
    release = release_of(versions.get("cann", ""))
    if release is not None and key(found)[:2] < key(release.driver):
        reason = f"driver {found} is too old: CANN {versions['cann']} needs {release.driver} or newer"
        raise Trouble(reason, "Install a newer Ascend HDK on the host: a container cannot bring its own driver.")


def devices(machine: Machine, numbers: list[int]) -> tuple[Device, ...]:
    """What npu-smi lists, restricted to the device files here and to ASCEND_RT_VISIBLE_DEVICES."""
    tools = (machine.root / place / "npu-smi" for place in ("usr/local/bin", "usr/local/sbin", "usr/bin"))
    smi = next((path for path in tools if path.exists()), None)
    if smi is None:
        raise Trouble("npu-smi is not found in /usr/local/bin", f"Install the driver's tools; docker run {MOUNTS} ...")
    done = subprocess.run([smi, "info"], capture_output=True, text=True, timeout=20, check=False)
    boards = [board for board in parse(done.stdout) if board[0] in numbers]
    if not boards:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise Trouble(f"npu-smi info lists no NPU: {said[-1]}", "Run npu-smi info as this user.")
    wanted = machine.environ.get(VISIBLE)
    if wanted is not None:
        places = [int(word) for word in wanted.split(",") if word.strip().isdigit()]
        chosen = [boards[place] for place in places if place < len(boards)]
        if not chosen:
            raise Trouble(f"{VISIBLE}={wanted!r} leaves none of {len(boards)} NPUs visible", f"Unset {VISIBLE}.")
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
        chip = CHIP.match(line)
        if chip and head:
            boards.append((int(chip[1] or head[1]), head[2], int(chip[3]) * 2**20))
        head = BOARD.match(line)
    return boards


def chip_of(name: str) -> str:
    """The family of a name of npu-smi's, such as 910B for 910B3."""
    return next((chip for start, chip in FAMILIES.items() if name.startswith(start)), name)
