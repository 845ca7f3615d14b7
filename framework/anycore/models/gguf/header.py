"""The header of a GGUF file: settings and where each tensor lies. Read by `config`, `weights` and the tokenizer.

Opening walks the header through a memory map and decodes a value only when it is asked for, so that a vocabulary of
260,000 words costs milliseconds; the size that the header implies is compared with the file's at once.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from anycore.errors import WeightsError
from anycore.models.source import check_whole

_NAMES = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
SCALARS = {kind: np.dtype(name) for kind, name in _NAMES.items()}
"""Value types of a fixed size, by their number in the file; between them are text and arrays."""
STRING, ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<I")


@lru_cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Numbers and bytes of one block, by ggml type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file. `shape` is in torch's order: the contiguous dimension last."""

    name: str
    shape: tuple[int, ...]
    type: int  # of ggml: how the numbers are stored
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GgufFile:
    """A GGUF file, mapped into memory.

    Raises:
        WeightsError: it is not GGUF, of an unknown version, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_whole(path)
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values: dict[str, tuple[int, int]] = {}  # key -> type, offset
        try:
            self._read_header()
        except (struct.error, OverflowError) as error:
            raise WeightsError(f"{path} is cut inside its header: it has only {len(self.data)} bytes") from error
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path}: its header is damaged: a name is not UTF-8 text") from error
        self._check_size()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the header, arrays as lists; the default if it has none."""
        if key not in self._values:
            return default
        try:
            return self._decode(*self._values[key])
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {key} is not UTF-8 text: {error}") from error

    def need(self, key: str) -> Any:
        """Return a value of the header that must be there."""
        if key not in self._values:
            raise WeightsError(f"{self.path} says nothing about {key}, which a model of its kind needs")
        return self.get(key)

    def whole(self, key: str, default: Any = None) -> int:
        """Return a count of the header, which must be there if there is no default.

        Raises:
            WeightsError: it is something else.
        """
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, value, "a whole number above 0")
        return value

    def listed(self, key: str) -> list[Any]:
        """Return an array of the header; empty if there is none."""
        value = self.get(key, [])
        if not isinstance(value, list):
            self.refuse(key, value, "a list")
        return value

    def refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        raise WeightsError(f"{self.path} says {key} = {str(value)[:80]}, which must be {wanted}")

    def words(self, key: str, wanted: Iterable[int]) -> list[str]:
        """Return the texts at some places of an array of texts, without decoding the others."""
        kind, offset = self._values.get(key, (None, 0))
        inner, count = struct.unpack_from("<IQ", self.data, offset) if kind == ARRAY else (None, 0)
        places = list(wanted)
        if inner != STRING or max(places, default=-1) >= count:
            raise WeightsError(f"{self.path}: {key} must be a list of more than {max(places, default=-1)} texts")
        offsets = self._text_offsets(offset)
        return [self._string(offsets[i])[0] for i in places]

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the stored bytes of a tensor, one row per row of it; nothing is copied."""
        info = self.tensors[name]
        rows = prod(info.shape[:-1])
        return np.frombuffer(self.data, np.uint8, info.size, info.offset).reshape(rows, -1)

    @cached_property
    def architecture(self) -> str:
        return str(self.need("general.architecture"))

    def _read_header(self) -> None:
        magic, version, tensor_count, value_count = struct.unpack_from("<4sIQQ", self.data, 0)
        if magic != b"GGUF":
            raise WeightsError(f"{self.path} is not a GGUF file: it begins with {magic!r}")
        if version not in (2, 3):
            kind = "written for big-endian machines" if not version & 0xFFFF else f"of GGUF version {version}"
            raise WeightsError(f"{self.path} is {kind}; versions 2 and 3, little-endian, can be read: convert it again")
        offset = 24
        for _ in range(value_count):
            key, offset = self._string(offset)
            kind = _NUMBER.unpack_from(self.data, offset)[0]
            self._values[key] = (kind, offset + 4)
            offset = self._end(kind, offset + 4)
        listed = []
        for _ in range(tensor_count):
            name, offset = self._string(offset)
            count = _NUMBER.unpack_from(self.data, offset)[0]
            if count > 4:
                raise WeightsError(f"{self.path}: its header is damaged: tensor {name} has {count} dimensions")
            *dimensions, kind, place = struct.unpack_from(f"<{count}QIQ", self.data, offset + 4)
            offset += 4 + 8 * count + 12
            listed.append((name, tuple(reversed(dimensions)), kind, place))
        alignment = self.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise WeightsError(f"{self.path}: its header is damaged: general.alignment is {alignment!r}")
        start = -(-offset // alignment) * alignment
        self.tensors = {
            name: TensorInfo(name, shape, kind, start + place, self._bytes(name, shape, kind))
            for name, shape, kind, place in listed
        }
        if len(self.tensors) != len(listed):
            raise WeightsError(f"{self.path} lists {len(listed) - len(self.tensors)} tensors twice")

    def _check_size(self) -> None:
        expected = max((t.offset + t.size for t in self.tensors.values()), default=0)
        if expected > len(self.data):
            state = f"its header describes {expected} bytes, the file has {len(self.data)}"
            raise WeightsError(f"{self.path} is cut: {state}: fetch it again")
        if self.get("split.count", 1) not in (0, 1):
            raise WeightsError(f"{self.path} is one of {self.get('split.count')} pieces: merge them first")

    def _bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """Return the stored size of a tensor."""
        sizes = _block_sizes()
        if kind not in sizes:
            raise WeightsError(f"{self.path}: {name} is of ggml type {kind}, which the installed gguf package lacks")
        block, stored = sizes[kind]
        if not shape or shape[-1] % block:
            raise WeightsError(f"{self.path}: {name} has the shape {shape}, whose rows are no multiple of {block}")
        return prod(shape) // block * stored

    def _string(self, offset: int) -> tuple[str, int]:
        """Return the text at an offset and the offset after it."""
        start, end = offset + 8, self._end(STRING, offset)
        return self.data[start:end].decode("utf-8"), end

    def _end(self, kind: int, offset: int) -> int:
        """Return the offset after a value of a type, without decoding it."""
        if kind in SCALARS:
            end = offset + SCALARS[kind].itemsize
        elif kind == STRING:
            end = offset + 8 + _LENGTH.unpack_from(self.data, offset)[0]
        elif kind == ARRAY:
            inner, count = struct.unpack_from("<IQ", self.data, offset)
            end = offset + 12
            if inner in SCALARS:
                end += count * SCALARS[inner].itemsize
            elif inner == STRING:
                end = self._text_offsets(offset)[-1]
            else:
                raise WeightsError(f"{self.path}: arrays of type {inner} are not read")
        else:
            raise WeightsError(f"{self.path}: value of unknown type {kind} at byte {offset}: the header is damaged")
        if end > len(self.data):
            raise struct.error("beyond the end of the file")
        return end

    def _decode(self, kind: int, offset: int) -> Any:
        if kind == STRING:
            return self._string(offset)[0]
        if kind != ARRAY:
            return np.frombuffer(self.data, SCALARS[kind], 1, offset)[0].item()
        inner, count = struct.unpack_from("<IQ", self.data, offset)
        if inner in SCALARS:
            return np.frombuffer(self.data, SCALARS[inner], count, offset + 12).tolist()
        return [self._string(place)[0] for place in self._text_offsets(offset)[:-1]]

    def _text_offsets(self, offset: int) -> list[int]:
        """Return where each text of an array lies, and where the last one ends."""
        count = struct.unpack_from("<IQ", self.data, offset)[1]
        end, data, unpack = offset + 12, self.data, _LENGTH.unpack_from
        offsets = [end]
        for _ in range(count):
            end += 8 + unpack(data, end)[0]
            offsets.append(end)
        return offsets
