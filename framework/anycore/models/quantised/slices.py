"""A rank's part of a quantised matrix, cut out of the tensors that make it up before they are unpacked.

A cut whose edges fall between words, groups and blocks leaves tensors that are a smaller matrix of the same scheme, so
that nothing else of the files is read. Other cuts stay for `cutting.cut_out`, which takes matrices as they were read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from safetensors import safe_open
from torch import Tensor

from anycore.models.checkpoint import Entry
from anycore.models.parallel import Cut
from anycore.models.parameters import canonical
from anycore.models.quantised.announced import Group
from anycore.models.quantised.awq import Awq
from anycore.models.quantised.compressed import Compressed
from anycore.models.quantised.folder import Matrix, Part, QuantisedFolder, Scheme
from anycore.models.quantised.fp8 import Fp8
from anycore.models.quantised.gptq import Gptq
from anycore.models.shards import Safetensors

INDICES = ("g_idx", "weight_g_idx")
"""The group of each input, by the endings of those that say it."""
WRITTEN = "weight_shape"
"""The shape of the whole matrix, which no part of it has."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Outputs or inputs along a dimension of a tensor, so many `numbers` in so many `places`."""

    dim: int
    numbers: int = 1
    places: int = 1

    def part(self, cut: Cut, length: int) -> slice | None:
        """The places of a cut along `length` of them; None where an edge lies inside one."""
        edges = []
        for edge in (cut.start, cut.stop):
            place, rest = divmod(edge * self.places, self.numbers)
            last = edge == cut.whole[cut.dim]
            if rest and not last:
                return None
            edges.append(length if last else place)
        return slice(*edges)


Axes = tuple[Axis | None, Axis | None]
"""Where outputs and inputs lie in a tensor; None: it says the same of all."""
Slices = dict[str, tuple[slice, ...]]


def narrow(folder: QuantisedFolder, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Let a folder give a rank's part of its matrices; return the cuts that are still to be made of what it gives."""
    left = dict(cuts)
    for name, matrix in list(folder.matrices.items()):
        cut = cuts.get(canonical(name))
        if cut is None or cut.whole != matrix.shape:  # the loader says what is wrong with the shape
            continue
        part = part_of(folder, name, matrix, cut)
        if part is not None:
            folder.matrices[name] = part
            folder.shapes[name] = part.shape
            del left[canonical(name)]
    return left


def part_of(folder: QuantisedFolder, name: str, matrix: Matrix, cut: Cut) -> Matrix | None:
    """A part of a matrix as one of its own; None where only the whole can be read."""
    files, layer = folder.files, name.removesuffix("weight")
    parts = {
        ending: Part(files.types[layer + ending], files.shapes[layer + ending])
        for ending in folder.scheme.endings
        if layer + ending in files.shapes and ending != WRITTEN
    }
    axes, group = layout(folder.scheme, layer.removesuffix("."), parts, matrix.shape)
    if cut.dim == 1:
        for ending in INDICES:
            if ending in parts:
                # In the order of activations, a rank's inputs are of any groups.
                if not natural(files, layer + ending, group):
                    return None
                del parts[ending]
    slices: Slices = {}
    for ending, part in parts.items():
        axis = axes[ending][cut.dim] if ending in axes else None
        taken = [slice(None)] * len(part.shape)
        if axis is not None:
            mine = axis.part(cut, part.shape[axis.dim])
            if mine is None:  # a word, group or block is of two ranks
                return None
            taken[axis.dim] = mine
        slices[ending] = tuple(taken)
    smaller = {ending: Part(parts[ending].type, sizes(parts[ending].shape, mine)) for ending, mine in slices.items()}
    try:
        small = folder.scheme.matrix(layer.removesuffix("."), smaller)
    except ValueError:  # groups are larger than the part
        return None
    shape = tuple(cut.stop - cut.start if dim == cut.dim else size for dim, size in enumerate(matrix.shape))
    if small is None or small.shape != shape or small.format != matrix.format:
        return None
    read = small.read

    def read_part(tensors: Mapping[str, Tensor]) -> Entry:
        written = tensors[WRITTEN].tolist() if WRITTEN in tensors else list(matrix.shape)
        if written != list(matrix.shape):
            raise ValueError(f"{WRITTEN} says {written}, but weight_packed holds {list(matrix.shape)}")
        return read(taken_of(tensors, slices))

    return Matrix(small.shape, small.format, read_part)


def taken_of(tensors: Mapping[str, Tensor], slices: Slices) -> dict[str, Tensor]:
    """The parts of a matrix's tensors that are a rank's, as views: no other bytes of the files are touched."""
    return {ending: tensors[ending][mine] for ending, mine in slices.items()}


def sizes(shape: tuple[int, ...], slices: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(len(range(*mine.indices(size))) for size, mine in zip(shape, slices, strict=True))


def natural(files: Safetensors, name: str, group: int) -> bool:
    """Whether an index says that inputs are in groups as they come."""
    with safe_open(files.owner[name].path, "pt") as file:
        index = file.get_tensor(name)
    return torch.equal(index.long(), torch.arange(len(index)) // group)


# --- where outputs and inputs lie --------------------------------------------------------------------------------


def layout(
    scheme: Scheme, layer: str, parts: Mapping[str, Part], shape: tuple[int, int]
) -> tuple[dict[str, Axes], int]:
    """The axes of each tensor that has some, and how many inputs a group has."""
    rows, inputs = shape
    if isinstance(scheme, Awq):
        group = inputs if scheme.settings.group == -1 else scheme.settings.group
        words, groups = Axis(1, 8), of_groups(0, group, inputs)
        return {"qweight": (words, Axis(0)), "qzeros": (words, groups), "scales": (Axis(1), groups)}, group
    if isinstance(scheme, Gptq):
        bits = scheme.settings.bits
        group = inputs if scheme.settings.group == -1 else scheme.settings.group
        groups = of_groups(0, group, inputs)
        return {
            "qweight": (Axis(1), Axis(0, 32, bits)),
            "qzeros": (Axis(1, 32, bits), groups),
            "scales": (Axis(1), groups),
        }, group
    if isinstance(scheme, Compressed):
        said = scheme.settings.group(layer) or scheme.settings.group(layer, table=True)
        assert said is not None  # or the matrix would not have been described
        if not said.floats:
            return whole_numbers(said, parts, rows, inputs), said.size or inputs
        return floats("weight_scale", parts, said.block, rows), inputs
    assert isinstance(scheme, Fp8)
    ending = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    return floats(ending, parts, scheme.settings.block, rows), inputs


def of_groups(dim: int, group: int, inputs: int) -> Axis | None:
    """Groups of inputs along a dimension; one group is of all."""
    return Axis(dim, group) if group < inputs else None


def whole_numbers(group: Group, parts: Mapping[str, Part], rows: int, inputs: int) -> dict[str, Axes]:
    words = (32, group.bits)
    groups = of_groups(1, group.size or inputs, inputs)
    scale: Axes = (by_row(parts["weight_scale"], rows), groups)
    points: Axes = (Axis(0, *words), groups) if "weight_packed" in parts else scale
    return {
        "weight": (Axis(0), Axis(1)),
        "weight_packed": (Axis(0), Axis(1, *words)),
        "weight_scale": scale,
        "weight_zero_point": points,
    }


def floats(ending: str, parts: Mapping[str, Part], block: tuple[int, int] | None, rows: int) -> dict[str, Axes]:
    scale = parts[ending]
    blocks = block is not None and len(scale.shape) == 2 and scale.shape not in ((1, 1), (rows, 1))
    axes: Axes = (Axis(0, block[0]), Axis(1, block[1])) if block and blocks else (by_row(scale, rows), None)
    return {"weight": (Axis(0), Axis(1)), ending: axes}


def by_row(scale: Part, rows: int) -> Axis | None:
    """Scales a row; None for one that is of all rows."""
    return Axis(0) if prod(scale.shape) >= rows > 1 and scale.shape[0] == rows else None
