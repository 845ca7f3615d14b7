"""Checkpoints of GPTQ, versions 1 and 2, in their natural order of inputs or in that of activations (desc_act)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anycore.models.checkpoint import Entry
from anycore.models.quantised.announced import GptqSettings, grouped
from anycore.models.quantised.folder import (
    FLOATS,
    Matrix,
    Part,
    eight_bits,
    four_bits,
    in_order,
    need,
    need_parts,
    scales,
    two_dimensions,
)
from anycore.models.quantised.words import unpack


class Gptq:
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in].

    Up to 4 bits become an Int4Weight, 8 symmetric bits an Int8Weight; 8 bits with zero points are made dense.
    """

    endings = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: GptqSettings) -> None:
        self.settings = settings

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        bits = self.settings.bits
        need_parts(parts, "qweight", "qzeros", "scales")
        words, outputs = two_dimensions(parts, "qweight", "[words of inputs, outputs]")
        inputs = words * 32 // bits
        group = inputs if self.settings.group == -1 else self.settings.group
        if group < 1 or not inputs:
            raise ValueError(f"qweight has {inputs} inputs in groups of {group}")
        groups = -(-inputs // group)
        need(parts, "qweight", (words, outputs), "I32")
        need(parts, "qzeros", (groups, -(-outputs * bits // 32)), "I32")
        need(parts, "scales", (groups, outputs), *FLOATS)
        if "g_idx" in parts:
            need(parts, "g_idx", (inputs,), "I32", "I64")

        def read(tensors: Mapping[str, Tensor]) -> Entry:
            return self.weight(tensors, group)

        small = bits < 8 or self.settings.symmetric
        return Matrix((outputs, inputs), grouped("int4" if bits < 8 else "int8", group) if small else None, read)

    def weight(self, tensors: Mapping[str, Tensor], group: int) -> Entry:
        bits = self.settings.bits
        data = unpack(tensors["qweight"].T, bits)
        zero = unpack(tensors["qzeros"], bits)[:, : len(data)].T.float() + self.settings.shift
        scale = scales(tensors["scales"], "scales").T
        order = act_order(tensors["g_idx"], "g_idx", group) if "g_idx" in tensors else None
        data = data if order is None else data[:, order]
        if bits < 8:
            return in_order(four_bits(data, scale, zero, group), order)
        if self.settings.symmetric and not bool((zero == 128).all()):
            raise ValueError("qzeros are not all 128, though config.json says the scheme is symmetric")
        return in_order(eight_bits(data, scale, zero, group, self.settings.symmetric), order)


def act_order(index: Tensor, ending: str, group: int) -> Tensor | None:
    """The inputs in an order in which groups lie together; None if they do so already.

    Raises:
        ValueError: a group is too large or too small, so that no order makes it one.
    """
    index = index.long()
    natural = torch.arange(len(index)) // group
    if torch.equal(index, natural):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], natural):
        raise ValueError(f"{ending} does not divide {len(index)} inputs into groups of {group}")
    return order
