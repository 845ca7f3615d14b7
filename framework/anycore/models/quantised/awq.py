"""Checkpoints of AutoAWQ: 4-bit matrices, transposed, their outputs interleaved within each word."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from anycore.models.checkpoint import Entry
from anycore.models.quantised.announced import AwqSettings, grouped
from anycore.models.quantised.folder import FLOATS, Matrix, Part, four_bits, need, need_parts, scales, two_dimensions
from anycore.models.quantised.words import unpack

INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of each eight lies in the nibble INTERLEAVED[i] of a word."""


class Awq:
    """qweight [in, out / 8] and qzeros [groups, out / 8] int32, scales [groups, out]: (q - zero) * scale."""

    endings = ("qweight", "qzeros", "scales")

    def __init__(self, settings: AwqSettings) -> None:
        self.settings = settings

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        need_parts(parts, *self.endings)
        inputs, words = two_dimensions(parts, "qweight", "[inputs, outputs / 8]")
        group = inputs if self.settings.group == -1 else self.settings.group
        if group < 1 or not inputs or inputs % group:
            raise ValueError(f"qweight has {inputs} inputs, no multiple of the group size {group}")
        need(parts, "qweight", (inputs, words), "I32")
        need(parts, "qzeros", (inputs // group, words), "I32")
        need(parts, "scales", (inputs // group, words * 8), *FLOATS)

        def read(tensors: Mapping[str, Tensor]) -> Entry:
            data, zero = (outputs(tensors[name]).T for name in ("qweight", "qzeros"))
            return four_bits(data, scales(tensors["scales"], "scales").T, zero, group)

        return Matrix((words * 8, inputs), grouped("int4", group), read)


def outputs(words: Tensor) -> Tensor:
    """[rows, out / 8] int32 → [rows, out] uint8 in their natural order."""
    numbers = unpack(words, 4).view(len(words), -1, 8)
    return numbers[:, :, list(INTERLEAVED)].flatten(1)
