"""Blocks of ggml as whole numbers with scales: what a GGUF file's matrices are repacked from, without rounding.

Every format is d * (q - a number of its own) or d * q - m. Those of up to 4 bits become an Int4Weight, whose zero point
is m / d then; those of 5, 6 and 8 bits without a minimum an Int8Weight. Five bits with a minimum of their own (Q5_1,
Q5_K) are neither: they are made dense, as are IQ and the ternary formats, whose numbers are looked up in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.weights import Int4Weight, Int8Weight
from anycore.models.gguf.names import FORMATS

Array = np.ndarray[Any, Any]
Numbers = tuple[Array, Array, Array | None]
"""Of n blocks: whole numbers [n, size], scales [n, groups], and minima [n, groups] in the same unit as d * q."""

LARGEST_ZERO = 2.0**14
"""Zero points are held in 16 bits. Beyond this one, a group's numbers differ by less than bfloat16 can say."""


@dataclass(frozen=True, slots=True)
class Block:
    """How the blocks of a type are taken apart, and what 0 is stored as where they have no minima."""

    split: Callable[[Array], Numbers]
    middle: int = 0


def half(blocks: Array, start: int) -> Array:
    """[n, 1] float32: the float16 at a byte of each block."""
    numbers: Array = blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)
    return numbers


def planes(packed: Array, bits: int) -> Array:
    """[n, bytes] → [n, 8 / bits, bytes]: numbers of a few bits, first all the lowest of each byte, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, -1, 1)
    numbers: Array = (packed[:, None, :] >> shifts) & np.uint8(2**bits - 1)
    return numbers


def runs(packed: Array, width: int, bits: int) -> Array:
    """[n, bytes] → [n, numbers]: planes of each `width` bytes after those of the `width` before."""
    count = len(packed)
    return planes(packed.reshape(-1, width), bits).reshape(count, -1)


def q4_0(b: Array) -> Numbers:
    return runs(b[:, 2:], 16, 4), half(b, 0), None


def q4_1(b: Array) -> Numbers:
    return runs(b[:, 4:], 16, 4), half(b, 0), -half(b, 2)


def q5_0(b: Array) -> Numbers:
    high = np.unpackbits(b[:, 2:6], axis=1, bitorder="little")
    return runs(b[:, 6:], 16, 4) | (high << 4), half(b, 0), None


def q8_0(b: Array) -> Numbers:
    return b[:, 2:] ^ np.uint8(128), half(b, 0), None  # int8 + 128, as bits


def q2_k(b: Array) -> Numbers:
    scales = b[:, :16]
    return runs(b[:, 16:80], 32, 2), half(b, 80) * (scales & 15), half(b, 82) * (scales >> 4)


def q3_k(b: Array) -> Numbers:
    """Two bits in `qs`, the third in `hmask`, whose bit of a byte is the run; 6-bit scales in two and four bits."""
    low = runs(b[:, 32:96], 32, 2)
    high = planes(b[:, :32], 1).reshape(len(b), -1)
    scales = planes(b[:, 96:104], 4).reshape(len(b), 16) | (planes(b[:, 104:108], 2).reshape(len(b), 16) << 4)
    return low | (high << 2), half(b, 108) * (scales.astype(np.float32) - 32), None


def q4_k(b: Array) -> Numbers:
    """Eight scales and minima of 6 bits: four of each whole, and four in nibbles and the others' upper bits."""
    d, m, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([d & 63, (mixed & 15) | ((d >> 6) << 4)], axis=1)
    minima = np.concatenate([m & 63, (mixed >> 4) | ((m >> 6) << 4)], axis=1)
    return runs(b[:, 16:], 32, 4), half(b, 0) * scales, half(b, 2) * minima


def q6_k(b: Array) -> Numbers:
    low, high = runs(b[:, :128], 64, 4), runs(b[:, 128:192], 32, 2)
    return low | (high << 4), half(b, 208) * b[:, 192:208].copy().view(np.int8), None


BLOCKS = {
    "Q4_0": Block(q4_0, 8),
    "Q4_1": Block(q4_1),
    "Q5_0": Block(q5_0, 16),
    "Q8_0": Block(q8_0, 128),
    "Q2_K": Block(q2_k),
    "Q3_K": Block(q3_k, 4),
    "Q4_K": Block(q4_k),
    "Q6_K": Block(q6_k, 32),
}
"""By the name of ggml's type."""

CHUNK = 1 << 22
"""Numbers taken apart at a time, so that what lies between is small."""


def repack(raw: Array, kind: str, columns: int) -> Int4Weight | Int8Weight:
    """[rows, bytes] as the file has them → the same matrix [rows, columns], with float32 as its dtype.

    Raises:
        ValueError: a scale or a minimum is not finite.
    """
    block, wanted = BLOCKS[kind], FORMATS[kind]
    rows, group = len(raw), wanted.group
    data = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, columns // group)
    zero = torch.full_like(scale, float(block.middle))
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        fill(block, raw[part].reshape(-1, bytes_of(kind)), data[part], scale[part], zero[part])
    if wanted.kind == "int4":
        return Int4Weight(data, scale, zero, group, torch.float32)
    signed = data.sub_(block.middle).view(torch.int8)  # modulo 256, which is what int8 means
    return Int8Weight(signed, scale, group, torch.float32)


def fill(block: Block, blocks: Array, data: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Take some rows' blocks apart; w = d * q - m becomes (q - m / d) * d, or where d says nothing (0 - 1) * m."""
    with np.errstate(invalid="ignore"):  # 0 times infinity, which is found below
        numbers, d, m = block.split(blocks)
    data.copy_(torch.from_numpy(numbers).view_as(data))
    scale.copy_(torch.from_numpy(d).view_as(scale))
    if not bool(torch.isfinite(scale).all()) or (m is not None and not np.isfinite(m).all()):
        raise ValueError("holds blocks whose scale is NaN or infinite")
    if m is None:
        return
    least = torch.from_numpy(m).view_as(scale)
    zero.copy_(least / scale)
    constant = ~(zero.abs() <= LARGEST_ZERO)
    scale[constant] = least[constant]
    zero[constant] = 1.0
    data.view(*scale.shape, -1)[constant] = 0


def bytes_of(kind: str) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
