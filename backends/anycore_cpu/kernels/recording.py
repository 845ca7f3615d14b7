"""Writing down the kernels that a step calls, to run them again in one call: what `replay.cpp` reads, and the memory
that a recorded step works in.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORMATS: dict[Any, str] = {ctypes.c_void_p: "=Q", ctypes.c_long: "=q", ctypes.c_int: "=q", ctypes.c_float: "=f4x"}
"""How an argument lies in a word of 8 bytes: in its first ones."""

Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]


class NotRecorded(Exception):
    """A step is made of more than kernels; says of what."""


class Call(ctypes.Structure):
    """`struct Call` of replay.cpp."""

    _fields_ = (("run", ctypes.c_void_p), ("words", ctypes.c_void_p))


RESERVED = 256 << 20
"""Bytes of address space, of which the system gives memory to what is written: the largest recorded step's."""

ALIGNED = 64


class Arena:
    """Memory of recorded steps, which run one at a time: each begins with all of it, and takes again what it has let go
    of. Pieces are cut where there is first room, so that steps stay close together.
    """

    def __init__(self, size: int = RESERVED) -> None:
        self.peak = 0  # bytes, of the largest step
        self.size = size
        self._memory = mmap.mmap(-1, size)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = [(0, size)]  # offset and size, in order, no two side by side

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As `torch.empty`; the piece is free again when the last view of it is gone."""
        count = torch.Size(shape).numel()
        size = max(1, -(-count * dtype.itemsize // ALIGNED)) * ALIGNED
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                break
        else:
            raise NotRecorded(f"a step works in more than {self.size >> 20} MiB")
        self.peak = max(self.peak, offset + size)
        piece = (ctypes.c_char * size).from_address(self.start + offset)  # which torch holds on to
        weakref.finalize(piece, self._release, offset, size).atexit = False
        return torch.frombuffer(piece, dtype=dtype)[:count].view(shape)

    def _release(self, offset: int, size: int) -> None:
        at = bisect.bisect(self._free, (offset, size))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            at, size = at - 1, size + before
        self._free.insert(at, (offset, size))


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel that was called: where it is to be called again, with which words, and the structs these point to."""

    name: str
    run: int
    words: ctypes.Array[ctypes.c_char]
    structures: list[Any]


class Recorder:
    """Stands where the library does: calls its kernels, and writes the calls down."""

    def __init__(self, library: ctypes.CDLL, signatures: Signatures) -> None:
        self._library = library
        self._signatures = signatures
        self.lines: list[Line] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        try:
            recorded = getattr(self._library, f"{name}_recorded")
        except AttributeError:
            raise NotRecorded(f"{name} has no way to be called again") from None
        place = ctypes.cast(recorded, ctypes.c_void_p).value
        types = self._signatures[name][1]

        def called(*arguments: Any) -> None:
            getattr(self._library, name)(*arguments)
            assert place is not None
            structures = [value for value in arguments if isinstance(value, ctypes.Structure)]
            self.lines.append(Line(name, place, self._words(types, arguments), structures))

        return called

    def program(self) -> tuple[ctypes.Array[Call], list[Any]]:
        """All calls so far, and what has to live as long as they may be made."""
        calls = [Call(line.run, ctypes.addressof(line.words)) for line in self.lines]
        return (Call * len(calls))(*calls), list(self.lines)

    @staticmethod
    def _words(types: tuple[Any, ...], arguments: tuple[Any, ...]) -> ctypes.Array[ctypes.c_char]:
        packed = b""
        for kind, value in zip(types, arguments, strict=True):
            if isinstance(value, ctypes.Structure):
                packed += struct.pack("=Q", ctypes.addressof(value))
            else:
                packed += struct.pack(FORMATS[kind], value or 0)
        return ctypes.create_string_buffer(packed, len(packed))


class OnlyKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside it, torch may look at tensors in other ways, but not compute: nobody would repeat that. What it is asked
    to allocate comes from an arena, and rows that it is asked to put side by side are joined by a kernel.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: or torch would import its compiler at the first call, only to leave it alone, which takes a second."""
        return False

    def __init__(self, arena: Arena, join: Callable[[Sequence[Tensor]], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._join = join

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._arena.empty(*args[0], dtype=kwargs.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.empty_like.default and args[0].is_contiguous():
            return self._arena.empty(*args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.cat.default and args[1:] in ((-1,), (args[0][0].dim() - 1,)):
            with self:
                return self._join(args[0])
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)
        with self:  # in inference mode what is made of views only arrives whole
            found = func.decompose(*args, **kwargs)
        if found is NotImplemented:
            raise NotRecorded(f"{func} is not a kernel of the CPU backend's own")
        return found
