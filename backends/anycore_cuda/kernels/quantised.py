"""Quantised matrices as the kernels read them: what `CudaOps.pack` makes, and by which rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anycore.contract.weights import Fp8Weight, Int4Weight, QuantisedWeight

PLANES = 8
"""4-bit numbers of a word of 32 bits: the columns of a block in as many planes, one behind the other."""
WIDTHS = (16, 8, 4)
"""Columns of a plane, and so words of a block: 16 are a block of 128 columns, as groups often are."""
VECTOR = 32
"""4-bit numbers of four words, which a thread reads at once; rows are padded to whole ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantised matrix [O, I] on the device.

    "int8" and "e4m3" are bytes as they came, "int4" words as `pack_nibbles` makes them. A scale a row is float32. A
    group of I has a 16-bit scale, in units of `unit`, beside it where numbers have 4 bits what is to be taken off:
    number * scale - offset. (Only groups of int8 that multiply float32 keep scales in float32, for exactness.)
    """

    kind: str  # "int8", "int4" or "e4m3"
    data: Tensor  # [O, I] int8 or uint8; [O, I / 8] int32
    scale: Tensor  # [O] float32; [O, groups] float16 or float32; "int4": [O, groups, 2] float16, scale and offset
    columns: int
    group: int  # 0: a scale a row
    unit: float
    dtype: torch.dtype  # of what it is multiplied by
    rounds: bool  # what it multiplies is rounded as its own numbers are, too

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    @property
    def groups(self) -> int:
        return self.scale.shape[1] if self.group else 1

    @property
    def width(self) -> int:
        """Of a plane of 4-bit numbers."""
        return width_of(self.columns, self.group)


def pack(weight: QuantisedWeight, e4m3: bool) -> Packed | Tensor:
    """A matrix in the kernels' layout; dense where its groups are of a size that they do not know.

    `e4m3`: the chip multiplies such numbers.
    """
    columns = weight.shape[1]
    if isinstance(weight, Fp8Weight):
        data = weight.data.contiguous().view(torch.uint8).clone()
        return Packed("e4m3", data, weight.scale.float().clone(), columns, 0, 1.0, weight.dtype, e4m3)
    whole = weight.group >= columns
    if not whole and weight.group % 16:
        return weight.dense()
    group = columns if whole else weight.group
    if isinstance(weight, Int4Weight):
        offset = weight.zero.float() * weight.scale.float()
        unit = unit_of(weight.scale, offset)
        pairs = torch.stack((weight.scale.float() / unit, offset / unit), dim=-1).half()
        nibbles = pack_nibbles(weight.data, width_of(columns, group))
        return Packed("int4", nibbles, pairs, columns, group, unit, weight.dtype, False)
    data = weight.data.clone(memory_format=torch.contiguous_format)
    if whole:
        return Packed("int8", data, weight.scale[:, 0].float().clone(), columns, 0, 1.0, weight.dtype, True)
    if weight.dtype == torch.float32:
        return Packed("int8", data, weight.scale.float().clone(), columns, group, 1.0, weight.dtype, False)
    unit = unit_of(weight.scale)
    return Packed("int8", data, (weight.scale.float() / unit).half(), columns, group, unit, weight.dtype, False)


def unit_of(*numbers: Tensor) -> float:
    """The power of two in which float16 holds them best: small ones keep their bits, and products of large ones with
    what a byte can be are no infinities of float16 yet.
    """
    largest = max((float(x.abs().max()) for x in numbers if x.numel()), default=0.0)
    if not math.isfinite(largest):
        raise ValueError(f"a scale of a quantised weight is {largest}")
    return 2.0 ** (math.frexp(largest)[1] - 8) if largest else 1.0


def width_of(columns: int, group: int) -> int:
    """Of the planes: the largest of which blocks fill a row, and of which four lie within one group of columns."""
    padded = -(-columns // VECTOR) * VECTOR
    fits = (n for n in WIDTHS if padded % (PLANES * n) == 0 and (group >= columns or group % (4 * n) == 0))
    return next(fits)


def pack_nibbles(data: Tensor, width: int) -> Tensor:
    """[O, I] uint8 of 0 … 15 → [O, I / 8] int32, I padded to whole vectors.

    Word j of a block of eight planes holds column j of each: the first four in the low halves of its bytes, the others
    in the high halves. So neighbouring words hold neighbouring columns, and what they are multiplied by is read in
    runs; and one mask makes four bytes of a word, all of one group, that an instruction multiplies.
    """
    rows, columns = data.shape
    padded = -(-columns // VECTOR) * VECTOR
    if padded != columns:
        data = torch.cat((data, data.new_zeros(rows, padded - columns)), dim=1)
    halves = data.view(rows, padded // (PLANES * width), 2, 4, width)
    pairs = halves[:, :, 0] | halves[:, :, 1] << 4  # [O, blocks, bytes of a word, words]
    return pairs.transpose(2, 3).contiguous().view(torch.int32).view(rows, -1)
