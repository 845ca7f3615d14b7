"""Calls of torch_npu's operators in the forms that the installed release has registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def operator(name: str) -> Any | None:
    """An operator's overload `default`; None where this torch_npu does not have it."""
    packet = getattr(torch.ops.npu, name, None)
    return getattr(packet, "default", None)


def takes(op: Any, argument: str) -> bool:
    return any(given.name == argument for given in op._schema.arguments)


class Store:
    """Writes rows of k and v into a cache. Slots are in range, and none appears twice."""

    def __init__(self) -> None:
        self.scatter = operator("npu_scatter_pa_kv_cache")  # not in torch_npu before 7.2.0
        self.update = operator("npu_scatter_nd_update_")
        # From 26.0.0 on the default is a layout in tiles, which this cache does not have.
        self.form = {"cache_mode": "Norm"} if self.scatter and takes(self.scatter, "cache_mode") else {}

    def __call__(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """k, v [T, Hkv, D], contiguous; keys, values [blocks, block_size, Hkv, D]; slots [T]."""
        if self.scatter is not None:
            self.scatter(k, v, keys, values, slots, **self.form)
            return
        assert self.update is not None
        for rows, cache in ((k, keys), (v, values)):
            self.update(cache.flatten(0, 1), slots[:, None], rows)
