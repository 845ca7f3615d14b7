"""Checkpoints of AutoAWQ: 4-bit matrices, transposed, their outputs interleaved within each word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight
from anycore.models.quantised import FLOATS, Matrix, Part, need, need_parts, scales
from anycore.models.words import unpack

ENDINGS = ("qweight", "qzeros", "scales")
INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of each eight lies in the nibble INTERLEAVED[i] of a word."""


@dataclass(frozen=True, slots=True)
class Awq:
    """qweight [in, out / 8] and qzeros [groups, out / 8] int32, scales [groups, out]: (q - zero) * scale."""

    group: int  # -1: all inputs
    endings: tuple[str, ...] = ENDINGS

    @staticmethod
    def of(settings: dict[str, Any]) -> Awq:
        """Read config.json's quantization_config, or AutoAWQ's own quant_config.json.

        Raises:
            ValueError: it asks for what is not read.
        """
        bits = settings.get("bits", settings.get("w_bit", 4))
        version = str(settings.get("version", "gemm")).lower()
        if bits != 4 or version not in ("gemm", "gemv"):
            raise ValueError(f"says AWQ of {bits} bits, version {version!r}: 4 bits and version 'gemm' are read")
        if version == "gemv":
            raise ValueError("says version 'gemv', a layout for one kernel: take the version 'gemm'")
        return Awq(int(settings.get("group_size", settings.get("q_group_size", 128))))

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        need_parts(parts, *ENDINGS)
        if len(parts["qweight"].shape) != 2:
            raise ValueError(f"qweight has shape {list(parts['qweight'].shape)}, not [inputs, outputs / 8]")
        inputs, words = parts["qweight"].shape
        group = inputs if self.group == -1 else self.group
        if group < 1 or not inputs or inputs % group:
            raise ValueError(f"qweight has {inputs} inputs, no multiple of the group size {group}")
        need(parts, "qweight", (inputs, words), "I32")
        need(parts, "qzeros", (inputs // group, words), "I32")
        need(parts, "scales", (inputs // group, words * 8), *FLOATS)

        def read(tensors: Mapping[str, Tensor]) -> Int4Weight:
            return weight(tensors["qweight"], tensors["qzeros"], tensors["scales"], group)

        return Matrix((words * 8, inputs), Format("int4", group), read)


def weight(qweight: Tensor, qzeros: Tensor, scale: Tensor, group: int) -> Int4Weight:
    data, zero = (outputs(packed).T.contiguous() for packed in (qweight, qzeros))
    return Int4Weight(data, scales(scale, "scales").T.contiguous(), zero.float(), group, torch.float32)


def outputs(words: Tensor) -> Tensor:
    """[rows, out / 8] int32 → [rows, out] uint8 in their natural order."""
    numbers = unpack(words, 4).view(len(words), -1, 8)
    return numbers[:, :, list(INTERLEAVED)].flatten(1)
