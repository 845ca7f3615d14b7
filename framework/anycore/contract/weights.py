"""Weights as plain data, before a backend repacks them. What a backend makes of one is its own secret."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix [out, in] in one of the dense dtypes, on the host or already on the device."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dense(self) -> Tensor:
        return self.data


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix of whole numbers with a scale for each group of a row: data * scale.

    Where a row is one group, a backend may round the rows it is multiplied by to int8, too, each by its own largest
    element (W8A8). The last group of a row may be shorter.
    """

    data: Tensor  # [out, in] int8
    scale: Tensor  # [out, groups] float32
    group: int  # consecutive inputs that share a scale; all of them: a scale a row
    dtype: torch.dtype  # of what it is multiplied by

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dense(self) -> Tensor:
        """[out, in] in `dtype`: what it stands for."""
        return (self.data.float() * spread(self.scale, self.group, self.shape[1])).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix of numbers 0 … 15 with a scale and a zero point for each group of a row: (data - zero) * scale (W4A16).

    The last group of a row may be shorter.
    """

    data: Tensor  # [out, in] uint8, one number a byte
    scale: Tensor  # [out, groups] float32
    zero: Tensor  # [out, groups] float32; 8 everywhere where the scheme is symmetric
    group: int  # consecutive inputs that share a scale
    dtype: torch.dtype  # of what it is multiplied by

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dense(self) -> Tensor:
        """[out, in] in `dtype`: what it stands for."""
        zero, scale = (spread(x, self.group, self.shape[1]) for x in (self.zero, self.scale))
        return ((self.data.float() - zero) * scale).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix of 8-bit floats (e4m3, without infinities) with a scale for each row: data * scale.

    A backend may round the rows it is multiplied by to e4m3, too, each by its own largest element.
    """

    data: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [out] float32
    dtype: torch.dtype  # of what it is multiplied by

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dense(self) -> Tensor:
        """[out, in] in `dtype`: what it stands for."""
        return (self.data.float() * self.scale[:, None]).to(self.dtype)


def spread(numbers: Tensor, group: int, inputs: int) -> Tensor:
    """[out, groups] → [out, inputs]: each group's number at each of its places."""
    return numbers.repeat_interleave(group, dim=1)[:, :inputs]


QuantisedWeight = Int8Weight | Int4Weight | Fp8Weight
Weight = DenseWeight | QuantisedWeight
"""Every weight format that `Ops.pack` may be handed."""
