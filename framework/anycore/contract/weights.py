"""Weights as plain data, before a backend repacks them. What a backend makes of one is its own secret."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix [out, in] in one of the dense dtypes, on the host or already on the device."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


Weight = DenseWeight
"""Every weight format that `Ops.pack` may be handed. Quantised formats join this union as they are added."""
