"""A folder of safetensors files as a checkpoint: headers checked in full before a byte of weights is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from anycore.contract.formats import Format
from anycore.errors import WeightsError
from anycore.models.source import check_whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ELEMENT_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
READ_SIZE = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file whose header agrees with its size; names in the order of their bytes."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, str]  # as safetensors spells them: "BF16", "F8_E4M3", "I32"

    @staticmethod
    def open(path: Path) -> Shard:
        """Read and check the header.

        Raises:
            WeightsError: the file is empty, cut, a Git LFS pointer, or contradicts its own header.
        """
        check_whole(path)
        header, start = read_header(path)
        entries = {name: entry for name, entry in header if name != "__metadata__"}
        names = [name for name, _ in header]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise WeightsError(f"{path} is damaged: its header lists {', '.join(repeated)} twice")
        end = check_places(path, entries)
        actual = path.stat().st_size
        if actual != start + end:
            state = f"{start + end - actual} bytes are missing" if actual < start + end else "it is too long"
            raise WeightsError(
                f"{path} is damaged: its header describes {start + end} bytes, the file has {actual}, so {state}: "
                "fetch it again"
            )
        ordered = sorted(entries, key=lambda name: entries[name]["data_offsets"][0])
        shapes = {name: tuple(entries[name]["shape"]) for name in ordered}
        return Shard(path, shapes, {name: entries[name]["dtype"] for name in ordered})


def read_header(path: Path) -> tuple[list[tuple[str, Any]], int]:
    """Return the header's entries, repeated ones included, and where the data starts."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise WeightsError(
                f"{path} is damaged: its header should take {length} bytes, but the file has {size} in all: it is cut, "
                "or not a safetensors file"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: pairs)
        entries = [(name, dict(entry)) for name, entry in header]
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: its header is not what safetensors writes ({error})") from error
    return entries, 8 + length


def check_places(path: Path, entries: dict[str, Any]) -> int:
    """Check that each tensor has the bytes its shape needs and that they follow one another; return where they end."""
    at = 0
    try:
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            need = prod(entry["shape"]) * ELEMENT_BITS[entry["dtype"]] // 8
            if first != at or last - first != need:
                raise WeightsError(
                    f"{path} is damaged: {name} {entry['dtype']}{entry['shape']} needs bytes {at} to {at + need}, its "
                    f"header gives {first} to {last}"
                )
            at = last
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} is damaged: its header is not what safetensors writes ({error!r})") from error
    return at


class Safetensors:
    """The shards of a folder as one checkpoint (see `checkpoint.Checkpoint`)."""

    def __init__(self, folder: Path, ahead: bool = True) -> None:
        """`ahead`: files are read whole, so that the next one may be brought into memory before it is asked for."""
        self.ahead = ahead
        index = read_index(folder)
        self.shards = [Shard.open(path) for path in shard_paths(folder, index)]
        self.owner: dict[str, Shard] = {}
        for shard in self.shards:
            for name in shard.shapes:
                if name in self.owner:
                    raise WeightsError(f"{name} is both in {self.owner[name].path} and in {shard.path}: remove one")
                self.owner[name] = shard
        self.shapes = {name: shard.shapes[name] for name, shard in self.owner.items()}
        self.types = {name: shard.types[name] for name, shard in self.owner.items()}
        self.formats: dict[str, Format] = {}
        for name, file in index.items():
            if name not in self.owner or self.owner[name].path.name != file:
                raise WeightsError(f"{folder / INDEX} says that {name} is in {file}, which does not hold it")

    def file_of(self, name: str) -> str:
        return str(self.owner[name].path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the mapped files, while the file after the current one is brought into memory."""
        with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as ahead:
            for here, after in zip(self.shards, [*self.shards[1:], None], strict=True):
                if after is not None and self.ahead:
                    ahead.submit(read_ahead, after.path)
                with safe_open(here.path, "pt") as file:
                    for name in here.shapes:
                        yield name, file.get_tensor(name)


def read_ahead(path: Path) -> None:
    """Bring a file into the page cache: by advice where the system takes it, else by reading it."""
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            return
        buffer = bytearray(READ_SIZE)
        while file.readinto(buffer):
            pass


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index of a sharded checkpoint; empty when one file holds everything."""
    path = folder / INDEX
    if (folder / SINGLE).exists() or not path.exists():
        return {}
    check_whole(path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is damaged: it holds no readable weight_map ({error!r})") from error
    strange = [file for file in index.values() if Path(str(file)).name != file]
    if strange:
        raise WeightsError(f"{path} names {strange[0]!r}, which is not a file in the same folder")
    return dict(index)


def shard_paths(folder: Path, index: dict[str, str]) -> Sequence[Path]:
    """The weight files of a folder."""
    if index:
        paths = [folder / name for name in sorted(set(index.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise WeightsError(
                f"{folder} lacks {len(missing)} of the {len(paths)} weight files in {INDEX}: {', '.join(missing)}: "
                "fetch them again"
            )
        return paths
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(path.name for path in found)
        raise WeightsError(
            f"{folder} holds {len(found)} safetensors files but no {INDEX} that says what is where: {names}"
        )
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise WeightsError(
            f"{folder} holds its weights only as pickle ({', '.join(pickles)}), which can run code when loaded and is "
            "refused: use a revision with safetensors files, or convert it (in transformers: load it, then "
            "save_pretrained)"
        )
    raise WeightsError(f"{folder} holds no weights: no {SINGLE} and no {INDEX}")
