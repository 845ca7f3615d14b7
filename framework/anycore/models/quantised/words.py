"""Whole numbers of 1 to 8 bits in 32-bit words, the lowest bits first: how AWQ, GPTQ and compressed-tensors pack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """[.., words] int32 → [.., numbers] uint8. A number may begin in one word and end in the next."""
    if words.dtype != torch.int32 or not 1 <= bits <= 8:
        raise ValueError(f"holds {words.dtype} for numbers of {bits} bits, not int32 for numbers of 1 to 8 bits")
    if 8 % bits == 0:  # none straddles a byte
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        parts: Tensor = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., None] >> shifts
        return (parts & ((1 << bits) - 1)).flatten(-2)
    wide = F.pad(words.long() & 0xFFFFFFFF, (0, 1))
    starts = torch.arange(words.shape[-1] * 32 // bits) * bits
    low, shift = starts // 32, starts % 32
    pairs: Tensor = wide[..., low] | (wide[..., low + 1] << 32)
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[.., numbers] of values below 2**bits → [.., words] int32; what is left of the last word is 0. 4 and 8 bits."""
    per_word = 32 // bits
    padded = F.pad(numbers.to(torch.uint8), (0, -numbers.shape[-1] % per_word))
    if bits == 4:
        padded = padded[..., ::2] | (padded[..., 1::2] << 4)
    elif bits != 8:
        raise ValueError(f"numbers of {bits} bits are not written")
    return padded.contiguous().view(torch.int32)
