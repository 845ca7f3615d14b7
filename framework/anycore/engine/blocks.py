"""Who owns which KV block: free blocks, reference counts and the prefix cache. Integers and hashes, no tensors.

A block is in one of three states: owned (references > 0), cached (references 0, its content can still be found by
hash) or empty. Owned blocks are never evicted; cached ones are, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from anycore.engine.chains import Chain, Chains


class BlockPool:
    """Blocks 1 … `blocks` - 1 of a KV cache; block 0 is scratch and never handed out."""

    def __init__(self, blocks: int, block_size: int, caching: bool = True) -> None:
        self.size = blocks - 1
        self.block_size = block_size
        self.caching = caching
        self.references = [0] * blocks
        # Free blocks, next to be taken first. Empty ones stand at the front, cached ones in order of last use.
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, blocks))
        self._found: dict[bytes, int] = {}  # hash -> block that holds it
        self._content: dict[int, tuple[bytes, bytes]] = {}  # block -> its hash, and what was hashed
        self._coming: dict[bytes, int] = {}  # hash -> running requests that are about to compute it
        self._chains = Chains(block_size)

    @property
    def free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, forgetting cached content where no empty block is left.

        The caller has checked `free`.
        """
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks that are owned or cached."""
        for block in blocks:
            if self.references[block] == 0:
                del self._free[block]
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner. Later blocks are freed first, so that a prefix outlives what follows it."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} released twice"
            if self.references[block] == 0:
                self._free[block] = None
                if block not in self._content:
                    self._free.move_to_end(block, last=False)

    # --- prefix cache -------------------------------------------------------------------------------------------

    def extend(self, chain: Chain, tokens: Sequence[int]) -> None:
        """Add to a chain the full blocks of its token list."""
        self._chains.extend(chain, tokens)

    def match(self, chain: Chain, most: int) -> list[int]:
        """Return the blocks of the longest cached prefix, `most` at most.

        Tokens are compared, so a hash collision cannot hit.
        """
        found: list[int] = []
        for block in map(self._found.get, chain.keys[:most]):
            if block is None:
                break
            found.append(block)
        while [self._content[block][1] for block in found] != chain.blocks[: len(found)]:
            found.pop()
        return found

    def publish(self, block: int, chain: Chain, place: int) -> None:
        """Make an owned block findable as one of a chain. The first with some content stays; a second is not cached."""
        key = chain.keys[place]
        if key in self._coming:
            self.settle([key])
        if self.caching and key not in self._found:
            self._found[key] = block
            self._content[block] = key, chain.blocks[place]

    def expect(self, keys: Sequence[bytes]) -> None:
        """Say that a running request is about to compute these blocks, so that others may wait for them."""
        for key in keys:
            self._coming[key] = self._coming.get(key, 0) + 1

    def settle(self, keys: Sequence[bytes]) -> None:
        """Take back `expect` for blocks that were published, or whose request left."""
        for key in keys:
            left = self._coming.get(key, 0) - 1
            if left > 0:
                self._coming[key] = left
            else:
                self._coming.pop(key, None)

    def is_coming(self, key: bytes) -> bool:
        """Whether a running request is about to compute this block."""
        return self.caching and key in self._coming and key not in self._found

    def clear(self) -> None:
        """Forget all cached content."""
        for block in [b for b in self._free if b in self._content]:
            self._forget(block)

    def check(self) -> None:
        """Assert that blocks are conserved: each is either free or owned, never both, never neither."""
        owned = {b for b, n in enumerate(self.references) if n > 0}
        free = set(self._free)
        assert not owned & free, f"owned and free: {sorted(owned & free)}"
        assert owned | free == set(range(1, self.size + 1)), "a block is lost"
        assert all(self._content[b][0] == key for key, b in self._found.items())
        assert len(self._found) == len(self._content)

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._found[content[0]]
