"""A CPU backend that keeps quantised weights as small as their formats say: for tests of plans, loading and models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anycore import plugins
from anycore.contract.backend import Backend
from anycore.contract.declare import BackendSpec
from anycore.contract.formats import SCHEMES
from anycore.contract.ops import Ops
from anycore.contract.weights import DenseWeight, Int4Weight, Int8Weight, Weight
from anycore.plugins import Plugins
from anycore_cpu.memory import CpuMemory


@dataclass
class Nibbles:
    """An Int4Weight with two numbers a byte, and 16-bit scales and zero points."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    group: int
    dtype: torch.dtype

    @staticmethod
    def of(weight: Int4Weight) -> Nibbles:
        data = torch.nn.functional.pad(weight.data, (0, weight.data.shape[1] % 2))
        data = data[:, ::2] | data[:, 1::2] << 4
        return Nibbles(data, weight.scale.half(), weight.zero.half(), weight.group, weight.dtype)

    def rows(self, ids: Tensor | None = None) -> Tensor:
        pick = slice(None) if ids is None else ids
        data = self.data[pick]
        whole = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
        return Int4Weight(whole, self.scale[pick].float(), self.zero[pick].float(), self.group, self.dtype).dense()


class KeepingOps(Ops):
    """Multiplies by what a handle stands for; notes what was packed."""

    def __init__(self) -> None:
        self.packed: list[Weight] = []

    def pack(self, weight: Weight) -> Any:
        if isinstance(weight, DenseWeight):
            return weight.data
        self.packed.append(replace(weight))
        return Nibbles.of(weight) if isinstance(weight, Int4Weight) else weight

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, dense(handle), bias)

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        return super().embedding(ids, dense(table))


class SmallOps(KeepingOps):
    """Remembers nothing; scales of groups have 16 bits."""

    def pack(self, weight: Weight) -> Any:
        handle = super().pack(weight)
        self.packed.clear()
        if isinstance(handle, Int8Weight) and handle.group < handle.shape[1]:
            return replace(handle, scale=handle.scale.half())
        return handle


def dense(handle: Any) -> Tensor:
    if isinstance(handle, Tensor):
        return handle
    made: Tensor = handle.rows() if isinstance(handle, Nibbles) else handle.dense()
    return made


def keeping(ops: type[Ops] = KeepingOps, tables: bool = True, schemes: tuple[str, ...] = tuple(SCHEMES)) -> Plugins:
    """The plugins with one backend: the CPU's device, its claims and `schemes`, but these operations."""
    loaded = plugins.load()
    cpu = loaded.backend("cpu")

    def opened(index: int) -> Backend:
        backend = Backend(torch.device("cpu"), CpuMemory(), ops())
        backend.name = "cpu"
        return backend

    rows = tuple(replace(row, schemes=schemes) for row in cpu.support)
    spec: BackendSpec = replace(cpu, support=rows, open=opened, tables=tables, copied_dtypes=())
    return replace(loaded, backends=(spec,))
