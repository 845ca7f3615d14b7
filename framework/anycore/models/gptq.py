"""Checkpoints of GPTQ, versions 1 and 2, in their natural order of inputs or in that of activations (desc_act)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, spread
from anycore.models.checkpoint import Entry, Ordered
from anycore.models.quantised import FLOATS, Matrix, Part, need, need_parts, scales
from anycore.models.words import unpack


@dataclass(frozen=True, slots=True)
class Gptq:
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in].

    Up to 4 bits become an Int4Weight, 8 symmetric bits an Int8Weight; 8 bits with zero points are made dense.
    """

    bits: int
    group: int  # -1: all inputs
    symmetric: bool
    shift: int  # what version 1 subtracts from a zero point before it is stored
    endings: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    @staticmethod
    def of(settings: dict[str, Any]) -> Gptq:
        """Read config.json's quantization_config, or AutoGPTQ's own quantize_config.json.

        Raises:
            ValueError: it asks for what is not read.
        """
        bits = settings.get("bits")
        if bits not in (2, 3, 4, 8):
            raise ValueError(f"says GPTQ of {bits!r} bits: 2, 3, 4 and 8 are read")
        layout = settings.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ValueError(f"says checkpoint_format {layout!r}: 'gptq' and 'gptq_v2' are read")
        if settings.get("dynamic"):
            raise ValueError("gives some layers settings of their own (dynamic), which is not read")
        symmetric = bool(settings.get("sym", True))
        return Gptq(bits, int(settings.get("group_size", -1)), symmetric, int(layout == "gptq"))

    def matrix(self, layer: str, parts: Mapping[str, Part]) -> Matrix:
        need_parts(parts, "qweight", "qzeros", "scales")
        if len(parts["qweight"].shape) != 2:
            raise ValueError(f"qweight has shape {list(parts['qweight'].shape)}, not [words of inputs, outputs]")
        words, outputs = parts["qweight"].shape
        inputs = words * 32 // self.bits
        group = inputs if self.group == -1 else self.group
        if group < 1 or not inputs:
            raise ValueError(f"qweight has {inputs} inputs in groups of {group}")
        groups = -(-inputs // group)
        need(parts, "qweight", (words, outputs), "I32")
        need(parts, "qzeros", (groups, -(-outputs * self.bits // 32)), "I32")
        need(parts, "scales", (groups, outputs), *FLOATS)
        if "g_idx" in parts:
            need(parts, "g_idx", (inputs,), "I32", "I64")

        def read(tensors: Mapping[str, Tensor]) -> Entry:
            return self.weight(tensors, group)

        shape = (outputs, inputs)
        if self.bits == 8 and not self.symmetric:
            return Matrix(shape, None, read)
        return Matrix(shape, Format("int8" if self.bits == 8 else "int4", group), read)

    def weight(self, tensors: Mapping[str, Tensor], group: int) -> Entry:
        data = unpack(tensors["qweight"].T, self.bits)
        zero = unpack(tensors["qzeros"], self.bits)[:, : len(data)].T.float() + self.shift
        scale = scales(tensors["scales"], "scales").T.contiguous()
        order = act_order(tensors["g_idx"].long(), group) if "g_idx" in tensors else None
        if order is not None:
            data = data[:, order]
        if self.bits < 8:
            weight: Int4Weight | Int8Weight = Int4Weight(data, scale, zero.contiguous(), group, torch.float32)
        elif self.symmetric:
            if not bool((zero == 128).all()):
                raise ValueError("qzeros are not all 128, though config.json says the scheme is symmetric")
            weight = Int8Weight((data.short() - 128).to(torch.int8), scale, group, torch.float32)
        else:
            inputs = data.shape[1]
            dense = (data.float() - spread(zero, group, inputs)) * spread(scale, group, inputs)
            return dense if order is None else dense[:, order.argsort()]
        return weight if order is None else Ordered(weight, order)


def act_order(index: Tensor, group: int) -> Tensor | None:
    """The inputs in an order in which groups lie together; None if they do so already.

    Raises:
        ValueError: a group is too large or too small, so that no order makes it one.
    """
    natural = torch.arange(len(index)) // group
    if torch.equal(index, natural):
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], natural):
        raise ValueError(f"g_idx does not divide {len(index)} inputs into groups of {group}")
    return order
