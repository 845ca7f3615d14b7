"""Shapes and limits as plain numbers, without torch: what plans are made of."""

from __future__ import annotations

from dataclasses import dataclass

from anycore.contract.declare import DTYPES


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a paged KV cache. One block holds `block_size` tokens of every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a name from DTYPES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers: 2 * layers * kv_heads * head_dim * element size."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes a running engine will never exceed; what a backend may capture or reserve for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int  # 0 when there is no KV cache
    blocks: int  # 0 when there is no KV cache
