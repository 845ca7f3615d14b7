"""What a prompt's blocks are found by: each full block of tokens has a hash of all up to its end."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

KEPT = 16
"""Beginnings of which the last prompt is remembered."""

ID_BYTES = array("q").itemsize


def root_hash(salt: str | None) -> bytes:
    """Start of a hash chain: requests with different salts never share a block."""
    return blake2b((salt or "").encode(), digest_size=16, person=b"salt" if salt is not None else b"").digest()


class Chain:
    """The full blocks of one token list.

    Attributes:
        keys: of each block, the hash of everything up to its end.
        blocks: what was hashed: the key before, then the block's ids, 8 bytes each. Equal ones are equal blocks, for a
            key may in principle collide.
    """

    __slots__ = ("blocks", "keys", "root")

    def __init__(self, salt: str | None = None) -> None:
        self.root = root_hash(salt)
        self.keys: list[bytes] = []
        self.blocks: list[bytes] = []

    def add(self, ids: bytes, width: int) -> None:
        """Add blocks, of `width` bytes of ids each."""
        key = self.keys[-1] if self.keys else self.root
        for at in range(0, len(ids), width):
            block = key + ids[at : at + width]
            key = hash_of(block)
            self.blocks.append(block)
            self.keys.append(key)


class Chains:
    """Extends chains. What a prompt has in common with the last one that began alike is taken from it, not hashed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._last: OrderedDict[bytes, tuple[bytes, Chain]] = OrderedDict()  # first block -> ids and chain

    def extend(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Add the full blocks of a token list that a chain does not have yet."""
        size, width = self.block_size, ID_BYTES * self.block_size
        begin, end = len(chain.keys) * size, len(tokens) // size * size
        if begin >= end:
            return
        ids = array("q", tokens[begin:end]).tobytes()
        if begin == 0:
            ids = ids[self._borrow(chain, ids, width) :]
        chain.add(ids, width)

    def _borrow(self, chain: Chain, ids: bytes, width: int) -> int:
        """Take the blocks that the last prompt with the same first block begins with; return how many bytes of ids."""
        first = chain.root + ids[:width]
        before = self._last.pop(first, None)
        self._last[first] = ids, chain
        if len(self._last) > KEPT:
            self._last.popitem(last=False)
        if before is None:
            return 0
        count = common(ids, before[0]) // width
        chain.keys += before[1].keys[:count]
        chain.blocks += before[1].blocks[:count]
        return count * width


def hash_of(block: bytes) -> bytes:
    return blake2b(block, digest_size=16).digest()


def common(ids: bytes, others: bytes) -> int:
    """How many bytes of ids two token lists begin with alike."""
    count = min(len(ids), len(others)) // ID_BYTES
    differ = np.frombuffer(ids, np.int64, count) != np.frombuffer(others, np.int64, count)
    return ID_BYTES * (int(differ.argmax()) if differ.any() else count)
