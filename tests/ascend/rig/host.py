"""The same bytes seen from both sides: npu storage is host memory here, so a CPU tensor can lie over it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


def host(value: Any) -> Any:
    """A CPU tensor over the bytes of an npu tensor; anything else as it is, lists element by element."""
    if isinstance(value, (list, tuple)):
        return type(value)([host(item) for item in value])
    if not isinstance(value, Tensor) or value.device.type != "npu":
        return value
    storage = value.untyped_storage()
    if value.numel() == 0 or storage.nbytes() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    usable = storage.nbytes() // value.element_size() * value.element_size()
    flat = torch.frombuffer(memory, dtype=torch.uint8)[:usable].view(value.dtype)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def device(tensor: Tensor, where: torch.device) -> Tensor:
    """A new npu tensor with the bytes of a CPU tensor."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
    host(out).copy_(tensor)
    return out


def scribble(tensor: Tensor) -> None:
    """Leave what nobody can take for a result."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(0)  # an index that exists: later operators of a capture are sized by running them
