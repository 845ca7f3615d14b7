"""Shapes and limits as plain numbers, without torch: what plans are made of."""

from __future__ import annotations

from dataclasses import dataclass

from anycore.contract.declare import DTYPES
from anycore.contract.formats import KV_SCALE_BYTES


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a paged KV cache. One block holds `block_size` tokens of every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str  # a name from DTYPES: of the rows that are stored, and of the cache where it is not rounded
    rounded: str | None = None  # a name from KV_CACHES; None: numbers are kept as they come

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's key, or value, of one KV head: its numbers, and its scale if the cache is rounded."""
        return self.head_dim * DTYPES[self.dtype] if self.rounded is None else self.head_dim + KV_SCALE_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers: 2 * layers * kv_heads * `head_bytes`."""
        return 2 * self.layers * self.kv_heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes a running engine will never exceed; what a backend may capture or reserve for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int  # 0 when there is no KV cache
    blocks: int  # 0 when there is no KV cache
