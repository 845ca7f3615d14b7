"""A folder whose matrices are quantised, by whichever of the known schemes, as one checkpoint of whole matrices.

Several tensors of the files make up one matrix. A scheme says, from headers alone, which shape and format it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, QuantisedWeight, spread
from anycore.errors import WeightsError
from anycore.models.checkpoint import Entry, Ordered
from anycore.models.quantised.announced import AwqSettings, CompressedSettings, Fp8Settings, GptqSettings, divided
from anycore.models.quantised.methods import announced_by, settings_of
from anycore.models.shards import Safetensors
from anycore.models.source import Source


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as its header describes it."""

    type: str  # as safetensors spells it: "I32", "F8_E4M3"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One quantised matrix, known from headers. `read` takes its tensors by their endings.

    It raises ValueError, with a sentence about the tensor at fault, if their values cannot be right. Weights come with
    float32 as their dtype: a checkpoint does not know what they will be multiplied by.
    """

    shape: tuple[int, int]
    format: Format | None  # None: it is made dense while it is read
    read: Callable[[Mapping[str, Tensor]], Entry]


class Scheme(Protocol):
    """How a kind of checkpoint stores matrices."""

    @property
    def endings(self) -> tuple[str, ...]:
        """What follows a layer's name in the names of the tensors that make up its matrix; the first marks one."""
        ...

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix | None:
        """Describe a layer's matrix; None if it is not quantised after all.

        Raises:
            ValueError: its tensors contradict one another; a sentence that names the one at fault.
        """
        ...


class QuantisedFolder:
    """A `loader.Checkpoint` over safetensors files: each quantised matrix is one tensor called LAYER.weight."""

    def __init__(self, source: Source, scheme: Scheme, ahead: bool = True) -> None:
        self.files = Safetensors(source.weights, ahead)
        self.scheme = scheme
        self.matrices: dict[str, Matrix] = {}
        self._parts = self._gather()
        self._whole: dict[str, str] = {}  # name of a part -> name of its matrix
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._describe()

    @property
    def formats(self) -> dict[str, Format]:
        return {name: matrix.format for name, matrix in self.matrices.items() if matrix.format is not None}

    def file_of(self, name: str) -> str:
        if name in self.matrices:
            layer = name.removesuffix("weight")
            name = next(layer + ending for ending in self.scheme.endings if layer + ending in self.files.shapes)
        return self.files.file_of(name)

    def tensors(self) -> Iterator[tuple[str, Entry]]:
        """Yield each matrix when the last of its parts has come."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.files.tensors():
            whole = self._whole.get(name)
            if whole is None:
                yield name, tensor
                continue
            layer = whole.removesuffix("weight")
            parts = waiting.setdefault(whole, {})
            parts[name.removeprefix(layer)] = tensor
            if len(parts) == len(self._parts[layer]):
                del waiting[whole]
                try:
                    yield whole, self.matrices[whole].read(parts)
                except ValueError as error:
                    raise WeightsError(f"{self.files.file_of(name)}: {layer}{error}") from error

    def _gather(self) -> dict[str, dict[str, Part]]:
        """The parts of each layer that has the first of the scheme's endings."""
        types, shapes = self.files.types, self.files.shapes
        mark = "." + self.scheme.endings[0]
        layers = [name.removesuffix(mark[1:]) for name in shapes if name.endswith(mark)]
        return {
            layer: {e: Part(types[layer + e], shapes[layer + e]) for e in self.scheme.endings if layer + e in shapes}
            for layer in layers
        }

    def _describe(self) -> None:
        for layer, parts in self._parts.items():
            whole = layer + "weight"
            try:
                if whole in self.files.shapes and "weight" not in parts:
                    raise ValueError("weight is there beside its quantised form: one of them is too much")
                matrix = self.scheme.matrix(layer.removesuffix("."), parts)
            except ValueError as error:
                first = layer + self.scheme.endings[0]
                raise WeightsError(f"{self.files.file_of(first)}: {layer}{error}") from error
            if matrix is not None:
                self.matrices[whole] = matrix
                self._whole |= dict.fromkeys((layer + ending for ending in parts), whole)
        last = {self._whole[name]: name for name in self.files.shapes if name in self._whole}
        for name, shape in self.files.shapes.items():
            whole = self._whole.get(name, name)
            if last.get(whole, name) == name:
                self.shapes[whole] = self.matrices[whole].shape if whole in self.matrices else shape


def open_folder(source: Source, ahead: bool = True) -> Safetensors | QuantisedFolder:
    """Open a folder's weights by what its config.json says of their quantisation.

    Raises:
        Unsupported: it says something that is not read.
        WeightsError: files are damaged, or do not agree with it.
    """
    settings = settings_of(source)
    if settings is None:
        return Safetensors(source.weights, ahead)
    return QuantisedFolder(source, scheme_of(settings, source), ahead)


def scheme_of(settings: dict[str, Any], source: Source) -> Scheme:
    from anycore.models.quantised import awq, compressed, fp8, gptq

    announced = announced_by(settings, source)
    if isinstance(announced, AwqSettings):
        return awq.Awq(announced)
    if isinstance(announced, GptqSettings):
        return gptq.Gptq(announced)
    if isinstance(announced, Fp8Settings):
        return fp8.Fp8(announced)
    assert isinstance(announced, CompressedSettings)
    return compressed.Compressed(announced)


def need_parts(parts: Mapping[str, Part], *endings: str) -> None:
    for ending in endings:
        if ending not in parts:
            raise ValueError(f"{ending} is missing, and without it {next(iter(parts))} says nothing")


def need(parts: Mapping[str, Part], ending: str, shape: tuple[int, ...], *types: str) -> None:
    """Check a part against the others.

    Raises:
        ValueError: it is of another shape or type.
    """
    found = parts[ending]
    if found.shape != shape:
        raise ValueError(f"{ending} has shape {list(found.shape)}, but the rest of the matrix needs {list(shape)}")
    if types and found.type not in types:
        raise ValueError(f"{ending} holds {found.type}, not {' or '.join(types)}")


FLOATS = ("F16", "BF16", "F32")


def scales(tensor: Tensor, ending: str) -> Tensor:
    """Scales as float32, if they can be scales.

    Raises:
        ValueError: one is not finite, or negative.
    """
    wide = tensor.float()
    strange = int((~torch.isfinite(wide)).sum())
    if strange:
        raise ValueError(f"{ending} holds {strange} scales of {wide.numel()} that are NaN or infinite")
    if wide.numel() and float(wide.min()) < 0:
        raise ValueError(f"{ending} holds a negative scale: {float(wide.min()):g}")
    return wide


def two_dimensions(parts: Mapping[str, Part], ending: str, meaning: str) -> tuple[int, int]:
    shape = parts[ending].shape
    if len(shape) != 2:
        raise ValueError(f"{ending} has shape {list(shape)}, not {meaning}")
    return shape[0], shape[1]


def four_bits(data: Tensor, scale: Tensor, zero: Tensor, group: int) -> Int4Weight | Tensor:
    """A matrix of numbers of up to 4 bits in groups that the contract's weights have; dense if it cannot be."""
    size = divided("int4", group)
    if size is None:
        return dense(data, scale, zero, group)
    scale, zero = (repeated(numbers, group, size, data.shape[1]) for numbers in (scale.float(), zero.float()))
    return Int4Weight(data.contiguous(), scale, zero, size, torch.float32)


def eight_bits(
    data: Tensor, scale: Tensor, zero: Tensor, group: int, symmetric: bool, whole_row: bool = False
) -> Int8Weight | Tensor:
    """The same of numbers 0 to 255, whose zero point is everywhere the same if `symmetric`."""
    size = group if whole_row else divided("int8", group)
    if size is None or not symmetric:
        return dense(data, scale, zero, group)
    signed = (data.short() - int(zero.reshape(-1)[0])).to(torch.int8)
    return Int8Weight(signed.contiguous(), repeated(scale.float(), group, size, data.shape[1]), size, torch.float32)


def dense(data: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    zero, scale = (spread(numbers.float(), group, data.shape[1]) for numbers in (zero, scale))
    return (data.float() - zero) * scale


def repeated(numbers: Tensor, group: int, size: int, columns: int) -> Tensor:
    """[out, groups] → the same of groups of `size`, a divisor of `group`."""
    return numbers.repeat_interleave(group // size, dim=1)[:, : -(-columns // size)].contiguous()


def in_order(weight: QuantisedWeight | Tensor, order: Tensor | None) -> Entry:
    """A matrix whose column j is column order[j] of what is meant."""
    if order is None:
        return weight
    return weight[:, order.argsort()] if isinstance(weight, Tensor) else Ordered(weight, order)
